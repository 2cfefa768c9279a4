"""An earlier run of the same table beside this one."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.result import Result, Row
from ringopt.tools.command import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from ringopt.tools.benchmarks.machine import Machine


def earlier(path: Path) -> dict[str, Any]:
    """What `--json` wrote. Raises CommandError for another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CommandError(f"--against {path}: {error}") from None
    if not isinstance(found, dict) or not {"machine", "title", "rows"} <= set(found):
        raise CommandError(f"--against {path}: it was not written by ringopt bench --json")
    return found


def compared(then: dict[str, Any], now: Result, machine: Machine) -> tuple[Table, list[str]]:
    """For each number that was measured: now / then over all rows that both runs have, and the row that changed most;
    and what a reader should know."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    before = {identity(row): row for row in then["rows"]}
    pairs = [(row, before[identity(row)]) for row in now.rows if identity(row) in before]
    if not pairs:
        raise CommandError("--against: no row of that run is measured in this one")
    table = Table(title="now / then", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("measured", "rows", "geometric mean", "smallest", "largest", "in"):
        table.add_column(heading, justify="left" if heading in ("measured", "in") else "right")
    for key, ratios in changes(pairs).items():
        place, largest = max(enumerate(ratios), key=lambda item: item[1][0])
        mean = statistics.geometric_mean([ratio for ratio, _ in ratios])
        smallest = min(ratio for ratio, _ in ratios)
        numbers = (f"{x:.2f}" for x in (mean, smallest, largest[0]))
        table.add_row(key, str(len(ratios)), *numbers, named(ratios[place][1]))
    notes = [f"{len(pairs)} of {len(now.rows)} rows are in both runs."]
    told = {key: value for key, value in then["machine"].items() if value != getattr(machine, key, None)}
    if told:
        notes.append("another machine then: " + ", ".join(f"{key} {value}" for key, value in told.items()))
    return table, notes


def identity(row: Row) -> tuple[tuple[str, str], ...]:
    """What was measured, and not what was found."""
    return tuple((key, str(value)) for key, value in row.items() if isinstance(value, (str, int, list)))


def changes(pairs: list[tuple[Row, Row]]) -> dict[str, list[tuple[float, Row]]]:
    """now / then of each positive number that is no error of rounding."""
    found: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for now, then in pairs:
        for key, value in now.items():
            old = then.get(key)
            if isinstance(value, float) and isinstance(old, float) and value > 0 and old > 0 and "error" not in key:
                found[key].append((value / old, now))
    return dict(found)


def named(row: Row) -> str:
    return " ".join(value for _, value in identity(row))
