"""An earlier run of the same table, compared with this one."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.lab.result import Result, Row
from ringopt.tools.common.command import CommandError

if TYPE_CHECKING:
    from rich.table import Table

    from ringopt.tools.benchmarks.lab.machine import Machine


def earlier(path: Path, name: str) -> dict[str, Any]:
    """What `--json` wrote of the table `name`. Raises CommandError for another file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CommandError(f"--against {path}: {error}") from None
    if not isinstance(found, dict) or not {"table", "machine", "rows"} <= set(found):
        raise CommandError(f"--against {path}: it was not written by ringopt bench --json")
    if found["table"] != name:
        raise CommandError(f"--against {path}: it holds the table {found['table']}, and this is {name}")
    return found


def compared(then: dict[str, Any], now: Result, machine: Machine) -> tuple[Table, list[str]]:
    """For each number that was measured: now / then over all rows that both runs have, and the row that changed most;
    and what a reader should know."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    before = {_identity(row, now.keys): row for row in then["rows"]}
    pairs = [(row, before[_identity(row, now.keys)]) for row in now.rows if _identity(row, now.keys) in before]
    table = Table(title="now / then", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("measured", "rows", "geometric mean", "smallest", "largest", "in"):
        table.add_column(heading, justify="left" if heading in ("measured", "in") else "right")
    for key, ratios in changes(pairs, now.keys).items():
        place, largest = max(enumerate(ratios), key=lambda item: item[1][0])
        mean = statistics.geometric_mean([ratio for ratio, _ in ratios])
        smallest = min(ratio for ratio, _ in ratios)
        numbers = (f"{x:.2f}" for x in (mean, smallest, largest[0]))
        table.add_row(key, str(len(ratios)), *numbers, " ".join(_identity(ratios[place][1], now.keys)))
    notes = [f"{len(pairs)} of {len(now.rows)} rows are in both runs, of what they have in common above 0."]
    differing = {key: value for key, value in then["machine"].items() if value != getattr(machine, key, None)}
    if differing:
        notes.append("another machine then: " + ", ".join(f"{key} {value}" for key, value in differing.items()))
    return table, notes


def _identity(row: Row, keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(row.get(key)) for key in keys)


def changes(pairs: list[tuple[Row, Row]], keys: Sequence[str]) -> dict[str, list[tuple[float, Row]]]:
    """now / then of each positive number that was found and is no error of rounding."""
    found: dict[str, list[tuple[float, Row]]] = defaultdict(list)
    for now, then in pairs:
        old = dict(numbers(then))
        for key, value in numbers(now):
            if key not in keys and "error" not in key and value > 0 and old.get(key, 0) > 0:
                found[key].append((value / old[key], now))
    return dict(found)


def numbers(row: Row) -> Iterator[tuple[str, float]]:
    """Those in dicts of a row too, such as the seconds of each strategy."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{key} {inner}", number) for inner, number in numbers(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield key, value
