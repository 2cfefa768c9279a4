"""Models on one process, with no rank to share with: backend="ring" beside backend="inductor". Their attention is one
call (sdpa) or spelled out."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import BACKENDS
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen, error
from ringopt.tools.common.command import natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench one-process --lengths 1024 --only causal alibi
  ringopt bench one-process --repeats 9 --json one-process.json
"""

MIB = 2**20


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench one-process`."""
    parser = tables.add_parser(
        "one-process",
        parents=[common],
        help="time, peak memory and error of models with nobody to share with, beside Inductor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths", metavar="N", nargs="+", type=natural, default=[1024, 4096], help="of the sequence (1024 4096)"
    )
    parser.add_argument("--repeats", metavar="N", type=natural, default=5, help="timed calls of each, by turns (5)")
    parser.add_argument("--only", metavar="MODEL", nargs="+", help="only these models")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for an unknown MODEL, and where memory does not suffice."""
    from ringopt.tools.benchmarks.models.small_models import CASES, HEADS, LAYERS, WIDTH
    from ringopt.tools.benchmarks.workers.one_process import rows_of

    names = chosen(arguments.only, list(CASES))
    cases = [(name, length) for length in arguments.lengths for name in names]
    rows: list[Row] = []
    for name, length in progress.track(cases, description="models"):
        rows += rows_of(name, length, arguments.repeats)
    title = f"Attention on one process: {LAYERS} layers, {HEADS} heads, width {WIDTH}, float32"
    sums = _totals(rows)
    return Result(title, COLUMNS, rows, sums, (_sentence(sums),), NOTES, KEYS)


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG
    from ringopt.tools.benchmarks.models.small_models import CASES

    wrong = {f"{backend}_wrong": sum((row[f"{backend}_error"] or 0) > WRONG for row in rows) for backend in BACKENDS}
    kinds = {SPELLED[fused]: [row for row in rows if CASES[row["model"]].fused is fused] for fused in (True, False)}
    return {"rows": len(rows), **wrong, "ratios": {kind: means(found) for kind, found in kinds.items() if found}}


def means(rows: list[Row]) -> Row:
    """Geometric ones of the ratios, None where there are none."""
    ratios = {what: [row[f"{what}_ratio"] for row in rows if row[f"{what}_ratio"]] for what in WHAT}
    return {what: statistics.geometric_mean(found) if found else None for what, found in ratios.items()}


def _sentence(sums: Row) -> str:
    kinds = [
        f"{kind}: " + " and ".join(f"{what} {_ratio(found[what])}" for what in WHAT)
        for kind, found in sums["ratios"].items()
    ]
    wrong = ", ".join(f"{backend} {sums[f'{backend}_wrong']}" for backend in BACKENDS)
    return f"ring / inductor, geometric means of {sums['rows']} rows; {'; '.join(kinds)}; wrong numbers: {wrong}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _milliseconds(backend: str) -> Column:
    return Column(f"{backend},\nms", lambda row: f"{row[f'{backend}_seconds'] * 1e3:,.1f}")


def _mebibytes(backend: str) -> Column:
    key = f"{backend}_bytes"
    return Column(f"{backend},\nMiB", lambda row: "-" if row[key] is None else f"{row[key] / MIB:,.0f}")


WHAT = ("time", "memory")
SPELLED = {True: "SDPA", False: "spelled out"}
KEYS = ("model", "length", "mode")
COLUMNS = (
    Column("model", lambda row: row["model"], right=False),
    Column("n", lambda row: str(row["length"])),
    Column("", lambda row: row["mode"][:5], right=False),
    *(_milliseconds(backend) for backend in BACKENDS),
    Column("ratio", lambda row: _ratio(row["time_ratio"])),
    *(_mebibytes(backend) for backend in BACKENDS),
    Column("ratio", lambda row: _ratio(row["memory_ratio"])),
    *(Column(f"{backend},\nerror", error(f"{backend}_error")) for backend in BACKENDS),
)
NOTES = (
    "infer: forward; train: and backward. ratio: ring / inductor. ms: median, the two by turns in one process.",
    "MiB: peak of a call above what was resident before it, in a process of its own.",
    "error: from eager, relative to the largest entry, gradients included; none where dropout draws.",
)
