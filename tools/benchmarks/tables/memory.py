"""The most memory that an attention holds at once on a rank, by strategy and number of ranks, beside its prediction, an
all-gather with SDPA, and torch's own ring.

Of all it is what the allocator of the CPU counts (tools/benchmarks/lab/tensor_bytes.py) in the calls of real ranks:
processes that talk by gloo, or out of each other's memory where ringopt does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from threading import Thread
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import FEW, PEERS, equal_shards
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, error
from ringopt.tools.common.command import CommandError, natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from multiprocessing.queues import Queue

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench memory --length 1024
  ringopt bench memory --ranks 2 4 --json memory.json
"""

MIB = 1 << 20
WAYS = ("forward", "training")
MANY = 4  # ranks, from which on the ring is to hold less than its peers
SHORT = {"forward": "f", "training": "f+b", "torch ring, all-to-all": "torch a2a"}


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench memory`."""
    parser = tables.add_parser(
        "memory",
        parents=[common],
        help="the most memory that an attention holds on a rank, measured and predicted, beside its peers",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", metavar="N", type=natural, default=2048, help="of the sequence (2048)")
    parser.add_argument("--ranks", metavar="P", nargs="+", type=natural, default=[2, 4, 8], help="processes (2 4 8)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Rows of every attention at each number of ranks. Raises CommandError for one rank."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.memory import HEADS, everyone, on_a_rank

    if min(arguments.ranks) < 2:
        raise CommandError(
            f"--ranks {min(arguments.ranks)}: one process has nobody to exchange with; expected 2 or more"
        )
    attentions = [len(list(everyone(p, arguments.length))) for p in arguments.ranks]
    rows: list[Row] = []
    with following(progress, sum(attentions)) as done:
        for ranks in arguments.ranks:
            found = as_ranks(ranks, on_a_rank, arguments.length, done, timeout=1200.0)
            for each in zip(*found, strict=True):
                far = max(rank["error"] for rank in each)
                rows.append({"length": arguments.length, **largest(list(each)), "error": far})
    rows.sort(key=lambda row: (row["pattern"], row["strategy"] in PEERS, row["strategy"], row["ranks"]))
    sums, notes = totals(rows), list(NOTES)
    if unequal := [p for p in arguments.ranks if not equal_shards(arguments.length, p)]:
        notes.append(f"peers take lengths that are multiples of twice the ranks: none on {_listed(unequal)}.")
    title = f"Most memory of a rank, {arguments.length} rows, {HEADS.q_heads} heads of {HEADS.key_dim}, float32; MiB"
    return Result(title, COLUMNS, rows, sums, sentences(sums), tuple(notes), KEYS)


@contextmanager
def following(progress: Progress, total: int) -> Iterator[Queue[str]]:
    """A queue of what processes have done, shown as it comes."""
    from ringopt.tools.benchmarks.lab.link_lab import context

    done: Queue[str] = context().Queue()
    task = progress.add_task("starting", total=total)

    def follow() -> None:
        for sentence in iter(done.get, ""):
            progress.update(task, advance=1, description=sentence)

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
        for key in (way, f"{way} predicted"):
            row[key] = max((rank[key] for rank in found if rank[key] is not None), default=None)
        row[f"{way} off"] = row[f"{way} predicted"] / row[way] - 1 if row[f"{way} predicted"] else None
    return row


def totals(rows: list[Row]) -> Row:
    """`off`: the farthest prediction. `slope`: of the ring's forward, bytes times ranks, the farthest from those of the
    fewest ranks; None of one number of ranks. `least`: who holds least, beside the ring."""
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    ring = {row["ranks"]: row["forward"] for row in rows if (row["pattern"], row["strategy"]) == ("full", "ring")}
    few = min(ring)
    slopes = [size * ranks / (ring[few] * few) for ranks, size in ring.items() if ranks != few]
    return {
        "rows": len(rows),
        "wrong": sum(row["error"] > WRONG for row in rows),
        "off": max(abs(row[f"{way} off"]) for row in rows for way in WAYS if row[f"{way} off"] is not None),
        "slope": max(slopes, key=lambda slope: abs(slope - 1), default=None),
        "least": [
            least(rows, way, pattern, ranks)
            for way in WAYS
            for pattern, ranks in sorted({(row["pattern"], row["ranks"]) for row in rows if row["strategy"] in PEERS})
        ],
    }


def least(rows: list[Row], way: str, pattern: str, ranks: int) -> Row:
    """Who holds least of all, which peer does of the peers, and what the ring holds compared with each."""
    here = [row for row in rows if (row["pattern"], row["ranks"]) == (pattern, ranks) and row[way] is not None]
    held = {row["strategy"]: row[way] for row in here}
    some_peers = [peer for peer in PEERS if peer in held]
    who, peer = (min(some, key=lambda who: (held[who], who != "ring")) for some in (held, some_peers))
    return {
        "way": way, "pattern": pattern, "ranks": ranks, "strategy": who, "peer": peer,
        "ring over least": held["ring"] / held[who], "ring over peer": held["ring"] / held[peer],
    }  # fmt: skip


def sentences(sums: Row) -> tuple[str, ...]:
    """What the table shows: how memory falls with the number of ranks, and how far predictions are off."""
    falls = f"ring falls as 1/p within {abs(sums['slope'] - 1):.0%}; " if sums["slope"] is not None else ""
    sentence = f"{falls}predictions within {sums['off']:.0%} of measured"
    return (sentence, *lowest(sums["least"]))


def lowest(found: list[Row]) -> Iterator[str]:
    """Who holds least on how many ranks; and is that the ring from MANY ranks on, and what beside the peers?"""
    least = []
    for where, group in groupby(found, _way):
        on = [f"{who} ({_listed(row['ranks'] for row in its)})" for who, its in groupby(group, itemgetter("strategy"))]
        least.append(f"{where} {', '.join(on)}")
    if least:
        yield f"holds least (on so many ranks): {'; '.join(least)}"
    many = {where: list(rows) for where, rows in groupby([row for row in found if row["ranks"] >= MANY], _way)}
    if many:
        peer, least_of_all = (
            {where: max(row[f"ring over {what}"] for row in rows) for where, rows in many.items()}
            for what in ("peer", "least")
        )
        ratios = ", ".join(f"{where} {ratio:.2f}" for where, ratio in peer.items())
        behind = ", ".join(f"{where} ({ratio:.3f} of the least)" for where, ratio in least_of_all.items() if ratio > 1)
        but = f" but in {behind}" if behind else ""
        yield f"from {MANY} ranks on the ring holds at most, of the lowest peer: {ratios}; it is the lowest of all{but}"


def _way(row: Row) -> str:
    return f"{row['pattern']} {SHORT[row['way']]}"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _size(key: str) -> Column:
    way, _, what = key.partition(" ")
    heading = f"{SHORT[way]}\n{what or 'measured'}"
    return Column(heading, lambda row: "-" if row[key] is None else f"{row[key] / MIB:.2f}")


def _off(way: str) -> Column:
    return Column("off", lambda row: "-" if row[f"{way} off"] is None else f"{row[f'{way} off']:+.0%}")


KEYS = ("length", "pattern", "strategy", "ranks")
COLUMNS = (
    Column("", lambda row: row["pattern"].replace("window(512)", "window"), right=False),
    Column("", lambda row: str(SHORT.get(row["strategy"], row["strategy"])), right=False),
    Column("p", lambda row: str(row["ranks"])),
    *(column for way in WAYS for column in (_size(way), _size(f"{way} predicted"), _off(way))),
    Column("f\nx p", lambda row: f"{row['forward'] * row['ranks'] / MIB:.1f}"),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, f+b: and backward; of tensors, beside the rank's own q, k, v and the gradient that comes in.",
    "of the rank that holds most, and of the one that is predicted to.",
    "error: from SDPA on one process, relative to the largest entry, gradients included.",
    f"documents: one a rank; {FEW} queries: on every rank, as in decoding.",
    "all-gather: of keys, then of values, and SDPA, beside its mask. torch ring: by all-gather, or all-to-all (a2a); "
    "forward only. Both through gloo; the least of three calls.",
)
