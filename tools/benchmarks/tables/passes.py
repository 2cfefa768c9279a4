"""What the passes take to shard a decoder of so many layers, beside what Inductor takes to compile it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.common.command import natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench passes
  ringopt bench passes --layers 12 --repeats 5 --json passes.json
"""

RANKS = 2
TIMEOUT = 1800.0  # seconds; a deep model compiles for minutes


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench passes`."""
    parser = tables.add_parser(
        "passes",
        parents=[common],
        help="what sharding a graph takes, per node and beside Inductor's compilation",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", metavar="N", type=natural, nargs="+", default=[12, 24, 48], help="(12 24 48)")
    parser.add_argument("--repeats", metavar="R", type=natural, default=3, help="of which the median is shown (3)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError where a process fails."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.passes import inductor, sharded

    progress.add_task("passes", total=None)
    found = as_ranks(RANKS, sharded, arguments.layers, arguments.repeats, timeout=TIMEOUT)
    (compiled,) = as_ranks(1, inductor, arguments.layers, timeout=TIMEOUT)
    rows = [
        row | {"error": max(row["error"], other["error"]), "inductor": seconds, "share": row["passes"] / seconds}
        for row, other, seconds in zip(*found, compiled, strict=True)
    ]
    sums = totals(rows)
    sentence = f"at most {1e3 * sums['node']:.2f} ms a node and {sums['share']:.1%} of Inductor's compilation"
    return Result("Passes over a decoder, in training", COLUMNS, rows, sums, (sentence,), NOTES, KEYS)


def totals(rows: list[Row]) -> Row:
    """The most of each."""
    return {key: max(row[key] for row in rows) for key in ("node", "share", "error")}


KEYS = ("layers",)
COLUMNS = (
    Column("layers", lambda row: str(row["layers"])),
    Column("nodes", lambda row: f"{row['nodes']:,}"),
    Column("passes,\ns", lambda row: f"{row['passes']:.2f}"),
    Column("a node,\nms", lambda row: f"{1e3 * row['node']:.2f}"),
    Column("Inductor,\ns", lambda row: f"{row['inductor']:.1f}"),
    Column("passes /\nInductor", lambda row: f"{row['share']:.1%}"),
    Column("error", error("error")),
)
NOTES = (
    "passes: from Dynamo's graph to the sharded one of 2 ranks, with the trace to ATen; nodes are of the latter.",
    "Inductor: of the model as it is, forward and backward, without a cache. All times are a processor's.",
    "error: of the sharded graph on 2 ranks, from the model, relative to the largest entry; gradients included.",
)
