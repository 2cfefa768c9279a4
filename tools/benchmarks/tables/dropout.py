"""`F.dropout` by position on one process, beside torch's own: compiled by Inductor, traced by AOTAutograd, eager."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import INNER
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.common.command import natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench dropout
  ringopt bench dropout --elements 65536 --repeats 21 --json dropout.json
"""

DTYPES = ("float32", "bfloat16")
WIDTH = 1024


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench dropout`."""
    parser = tables.add_parser(
        "dropout",
        parents=[common],
        help="time of dropout that is equal on any number of ranks, beside torch's own",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    many = [2**18, 2**22, 2**24]
    parser.add_argument(
        "--elements", metavar="N", type=natural, nargs="+", default=many, help=f"rounded up to rows of {WIDTH}"
    )
    parser.add_argument("--repeats", metavar="N", type=natural, default=15, help="timed calls of each, by turns (15)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """A row for each number of elements, dtype and inner backend."""
    from ringopt.tools.benchmarks.workers.dropout import drops

    cases = [(many, dtype, inner) for many in arguments.elements for dtype in DTYPES for inner in INNER]
    rows: list[Row] = []
    for many, dtype, inner in progress.track(cases, description="dropout"):
        rows.append(drops(-(-many // WIDTH), WIDTH, dtype, inner, arguments.repeats))
    sums = totals(rows)
    means = ", ".join(f"{inner} {ratio:.2f}" for inner, ratio in sums["ratios"].items())
    sentence = f"ring / torch, geometric means: {means}; at most {sums['most']:.2f}"
    return Result("Dropout: forward and backward", COLUMNS, rows, sums, (sentence,), NOTES, KEYS)


def totals(rows: list[Row]) -> Row:
    """The mean ratio by inner backend, the largest ratio and the largest error."""
    ratios = {inner: [row["ratio"] for row in rows if row["inner"] == inner] for inner in INNER}
    means = {inner: statistics.geometric_mean(found) for inner, found in ratios.items() if found}
    return {"ratios": means, "most": max(row["ratio"] for row in rows), "error": max(row["error"] for row in rows)}


def _milliseconds(who: str) -> Column:
    return Column(f"{who},\nms", lambda row: f"{row[f'{who}_seconds'] * 1e3:,.2f}")


KEYS = ("elements", "dtype", "inner")
COLUMNS = (
    Column("elements", lambda row: f"{row['elements']:,}"),
    Column("", lambda row: row["dtype"], right=False),
    Column("inner backend", lambda row: row["inner"], right=False),
    _milliseconds("ring"),
    _milliseconds("torch"),
    Column("ratio", lambda row: f"{row['ratio']:.2f}"),
    Column("error", error("error")),
)
NOTES = (
    "torch: the same function by the inner backend alone. ms: median, the two by turns in one process.",
    "error: of the gradient from the one that the output's own zeros give, relative to the largest entry.",
)
