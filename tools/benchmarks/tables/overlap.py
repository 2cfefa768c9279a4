"""How much of the exchange of a ring is hidden behind its compute, on a link of known speed.

The link is made so slow that the exchange alone takes given shares of the compute alone. Each rank is a process of one
thread in a network namespace of its own, joined by rate-limited links (Linux, root, iproute2); with --emulated, and
with a note where no such links can be made, the messages are held back instead. Blocks are computed, where there are
as many cores as ranks, and in other rows stood in for by sleep. Each attention is run by itself and inside a compiled
model, in which its exchange starts before what needs no keys.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error, long_enough
from ringopt.tools.common.command import natural, two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench overlap --ranks 2 --shares 0.5 --lengths 4096 --repeats 3
  ringopt bench overlap --emulated --lengths 2048 --json overlap.json
"""

ROWS = {False: 2048, True: 1024}  # of a rank, with blocks computed and slept through
KINDS = {False: "computed", True: "slept"}


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench overlap`."""
    parser = tables.add_parser(
        "overlap",
        parents=[common],
        help="the part of the exchange that is hidden, on a link of known speed",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", metavar="P", nargs="+", type=two_or_more, default=[2, 4], help="2 or more (2 4)")
    parser.add_argument(
        "--lengths",
        metavar="N",
        nargs="+",
        type=natural,
        help=f"of the sequence (for each of the ranks {ROWS[False]} where computed, {ROWS[True]} where slept)",
    )
    parser.add_argument(
        "--shares",
        metavar="X",
        nargs="+",
        type=_share,
        default=[0.3, 0.6, 0.9],
        help="exchange / compute (0.3 0.6 0.9)",
    )
    parser.add_argument("--repeats", metavar="N", type=natural, default=3, help="timed calls of each, by turns (3)")
    parser.add_argument("--emulated", action="store_true", help="hold messages back instead of making links")
    parser.set_defaults(measure=measure)


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.01 <= found <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.01 to 100")
    return found


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError."""
    from ringopt.tools.benchmarks.lab.link_lab import why_unavailable
    from ringopt.tools.benchmarks.workers.overlap import rows_of
    from ringopt.tools.benchmarks.workers.overlap_rank import OverlapCase

    long_enough(arguments.lengths or (), max(arguments.ranks))
    missing = None if arguments.emulated else why_unavailable()
    emulated = arguments.emulated or missing is not None
    rows: list[Row] = []
    for ranks in progress.track(arguments.ranks, description="ranks"):
        # With fewer cores than ranks there is no compute beside which messages could travel.
        kinds = (True,) if ranks > len(os.sched_getaffinity(0)) else (False, True)
        cases = [
            OverlapCase(pattern, length, ranks, slept, hoisted)
            for slept in kinds
            for length in arguments.lengths or [ROWS[slept] * ranks]
            for pattern, hoisted in (("causal", False), ("full", False), ("causal", True))
        ]
        rows += [row | {"emulated": emulated} for row in rows_of(cases, arguments.shares, arguments.repeats, emulated)]
    link = "emulated links" if emulated else "rate-limited links between network namespaces"
    notes = NOTES if missing is None else (*NOTES, f"links are emulated: {missing}")
    title = f"Ring attention, 4 heads of 64, float32, one thread a rank, on {link}"
    return Result(title, COLUMNS, rows, _totals(rows), (), notes, KEYS)


def _totals(rows: list[Row]) -> dict[str, Any]:
    kinds = {row["slept"] for row in rows}
    least = {KINDS[kind]: min(row["hidden"] for row in rows if row["slept"] is kind) for kind in sorted(kinds)}
    return {"rows": len(rows), "least_hidden": least}


def _milliseconds(key: str, heading: str) -> Column:
    return Column(heading, lambda row: "-" if row[key] is None else f"{row[key] * 1e3:.0f}")


KEYS = ("pattern", "length", "ranks", "slept", "hoisted", "emulated", "share", "pass")
COLUMNS = (
    Column("n", lambda row: str(row["length"])),
    Column("p", lambda row: str(row["ranks"])),
    Column("blocks", lambda row: "slept" if row["slept"] else "real", right=False),
    Column("", lambda row: f"{'hoisted' if row['hoisted'] else row['pattern']} {row['pass'][0]}", right=False),
    Column("link\nMB/s", lambda row: f"{row['rate'] / 1e6:.0f}"),
    _milliseconds("compute", "compute"),
    _milliseconds("exchange", "exch."),
    _milliseconds("total", "both"),
    _milliseconds("exposed", "exposed"),
    _milliseconds("written", "late"),
    Column("hidden", lambda row: f"{row['hidden']:.0%}"),
    Column("both /\nlonger", lambda row: f"{row['over_longer']:.2f}"),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, b: backward; milliseconds, medians of the slowest rank, by turns. compute: without messages; "
    "exch.: messages alone; both: ring attention.",
    "blocks: computed (real); or slept for as long as 5 GFLOP/s take, so that moving the bytes meanwhile takes next "
    "to nothing of the processors, as beside a GPU: all there is where ranks are more than cores. Their error is that "
    "of the same call, computed.",
    "With computed blocks, and no more cores than ranks, what a rank's process computes to send and receive cannot be "
    'hidden: "moving" in the JSON.',
    "exposed: of both, the time in which a rank waits for messages and computes nothing, off the timeline.",
    "hoisted: causal attention in a compiled model, with wide layers that need no keys before it and beside it; the "
    "exchange starts ahead of them. late: both, as written, the exchange with the attention.",
    "hidden: (compute + exchange - both) / the shorter of the two. MB/s: bytes sent in the time of the exchange alone.",
    "error: from one process, relative to the largest entry; outputs, or the gradients of q, k and v.",
)
