"""The most memory that an attention holds at once on a rank, by strategy and number of ranks, beside its prediction."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.result import Column, Result, Row, error
from ringopt.tools.command import CommandError, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from multiprocessing.queues import Queue

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench memory --length 1024
  ringopt bench memory --ranks 2 4 --json memory.json
"""

STRATEGIES = ("local", "halo", "ring", "ring2", "gather", "ring_q", "gather_q", "ulysses", "merge")
PATTERNS = {"full": "contiguous", "causal": "zigzag", "window(512)": "contiguous"}  # and the layout
FEW = 16  # queries that every rank has, over keys that are spread
MIB = 1 << 20
WAYS = ("forward", "training")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    parser = tables.add_parser(
        "memory",
        parents=[common],
        help="the most memory that an attention holds on a rank, measured and predicted",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", metavar="N", type=whole, default=2048, help="of the sequence (2048)")
    parser.add_argument("--ranks", metavar="P", nargs="+", type=whole, default=[2, 4, 8], help="processes (2 4 8)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    from ringopt.tools.benchmarks.link_lab import as_ranks
    from ringopt.tools.benchmarks.memory_ranks import HEADS, on_a_rank, planned

    if min(arguments.ranks) < 2:
        raise CommandError(
            f"--ranks {min(arguments.ranks)}: one process has nobody to exchange with; expected 2 or more"
        )
    attentions = [len(list(planned(p, arguments.length, HEADS, list(PATTERNS.items())))) for p in arguments.ranks]
    rows: list[Row] = []
    with following(progress, sum(attentions)) as done:
        for ranks in arguments.ranks:
            found = as_ranks(ranks, on_a_rank, arguments.length, done, timeout=1200.0)
            for each in zip(*found, strict=True):
                far = max(rank["error"] for rank in each)
                rows.append({"length": arguments.length, **largest(list(each)), "error": far})
    rows.sort(key=lambda row: (row["pattern"], row["strategy"], row["ranks"]))
    sums = totals(rows)
    title = f"Most memory of a rank, {arguments.length} rows, {HEADS.q_heads} heads of {HEADS.key_dim}, float32; MiB"
    return Result(title, COLUMNS, rows, sums, sentences(sums), NOTES, KEYS)


@contextmanager
def following(progress: Progress, total: int) -> Iterator[Queue[str]]:
    """A queue in which processes tell what they have done, shown as it comes."""
    from ringopt.tools.benchmarks.link_lab import context

    done: Queue[str] = context().Queue()
    task = progress.add_task("starting", total=total)

    def follow() -> None:
        for said in iter(done.get, ""):
            progress.update(task, advance=1, description=said)

    follower = Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield done
    finally:
        done.put("")
        follower.join()


def largest(found: list[Row]) -> Row:
    """Of the rank that holds most, and of the one that is predicted to."""
    row: Row = {key: found[0][key] for key in ("pattern", "strategy", "ranks")}
    for way in WAYS:
        row[way], row[f"{way} predicted"] = (max(rank[key] for rank in found) for key in (way, f"{way} predicted"))
        row[f"{way} off"] = row[f"{way} predicted"] / row[way] - 1
    return row


def totals(rows: list[Row]) -> Row:
    """`off`: the farthest prediction. `slope`: of the ring's forward, bytes times ranks, the farthest from those of the
    fewest ranks; None of one number of ranks."""
    from ringopt.tools.benchmarks.numbers import WRONG

    ring = {row["ranks"]: row["forward"] for row in rows if (row["pattern"], row["strategy"]) == ("full", "ring")}
    few = min(ring)
    slopes = [size * ranks / (ring[few] * few) for ranks, size in ring.items() if ranks != few]
    return {
        "rows": len(rows),
        "wrong": sum(row["error"] > WRONG for row in rows),
        "off": max(abs(row[f"{way} off"]) for row in rows for way in WAYS),
        "slope": max(slopes, key=lambda slope: abs(slope - 1), default=None),
    }


def sentences(sums: Row) -> tuple[str, ...]:
    falls = f"ring falls as 1/p within {abs(sums['slope'] - 1):.0%}; " if sums["slope"] is not None else ""
    return (f"{falls}predictions within {sums['off']:.0%} of measured",)


def size(key: str) -> Column:
    way = "f+b" if key.startswith("training") else "f"
    return Column(f"{way}\n{key.partition(' ')[2] or 'measured'}", lambda row: f"{row[key] / MIB:.2f}")


def off(way: str) -> Column:
    return Column("off", lambda row: f"{row[f'{way} off']:+.0%}")


KEYS = ("length", "pattern", "strategy", "ranks")
COLUMNS = (
    Column("", lambda row: row["pattern"], right=False),
    Column("", lambda row: row["strategy"], right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    *(column for way in WAYS for column in (size(way), size(f"{way} predicted"), off(way))),
    Column("f\nx ranks", lambda row: f"{row['forward'] * row['ranks'] / MIB:.1f}"),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, f+b: and backward; of tensors, beside the rank's own q, k, v and the gradient that comes in.",
    "of the rank that holds most, and of the one that is predicted to.",
    "error: from SDPA on one process, relative to the largest entry, gradients included.",
    f"documents: one a rank; {FEW} queries: on every rank, as in decoding.",
)
