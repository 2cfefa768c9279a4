"""Causal attention on ranks of one thread each, beside SDPA on one process of one thread."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error, long_enough
from ringopt.tools.common.command import natural, two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench speedup --lengths 4096 --repeats 3
  ringopt bench speedup --json speedup.json
"""


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench speedup`."""
    parser = tables.add_parser(
        "speedup",
        parents=[common],
        help="how much faster attention is on ranks than on one process",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--lengths",
        metavar="N",
        nargs="+",
        type=natural,
        default=[4096, 8192, 16384],
        help="of the sequence (4096 8192 16384)",
    )
    parser.add_argument("--ranks", metavar="P", type=two_or_more, default=2, help="no more than cores (2)")
    parser.add_argument("--repeats", metavar="N", type=natural, default=5, help="timed calls of each (5)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError where a rank fails."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.lab.machine import this_machine
    from ringopt.tools.benchmarks.workers.speedup import on_a_rank

    long_enough(arguments.lengths, arguments.ranks)
    rows: list[Row] = []
    for length in progress.track(arguments.lengths, description="lengths"):
        found = as_ranks(arguments.ranks, on_a_rank, length, arguments.repeats, timeout=3600.0)
        for parts in zip(*found, strict=True):
            row: Row = {"length": length, "ranks": arguments.ranks, "training": parts[0]["training"]}
            row |= {key: max(part[key] for part in parts) for key in ("spread", "error")}
            alone = parts[0]["alone"]
            rows.append(row | {"alone": alone, "faster": alone / row["spread"]})
    cores = this_machine().cores
    shared = (f"{arguments.ranks} ranks share {cores} cores: more than cores cannot be faster.",)
    return Result(TITLE, COLUMNS, rows, _totals(rows), (), NOTES + shared * (arguments.ranks > cores), KEYS)


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    return {"rows": len(rows), "wrong": sum(row["error"] > WRONG for row in rows)}


TITLE = "Causal attention, 8 heads of 64, float32, one thread a rank"
KEYS = ("length", "ranks", "training")
COLUMNS = (
    Column("n", lambda row: f"{row['length']:,}"),
    Column("", lambda row: "forward + backward" if row["training"] else "forward", right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("s", lambda row: f"{row['spread']:.3f}"),
    Column("alone, s", lambda row: f"{row['alone']:.3f}"),
    Column("times as fast", lambda row: f"{row['faster']:.2f}"),
    Column("error", error("error")),
)
NOTES = (
    "s: the slowest rank's median, by turns with the other. alone: SDPA on one of the processes, while others wait.",
    "error: from SDPA, relative to the largest entry, gradients included.",
)
