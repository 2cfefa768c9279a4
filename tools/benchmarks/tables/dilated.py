"""Dilated attention, w = (2048, 4096), r = (1, 2): cost by length, beside dense SDPA, and on two ranks beside one."""

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
  ringopt bench dilated --scale 64 --repeats 1
  ringopt bench dilated --json dilated.json
"""

LENGTHS, RATES = (2048, 4096), (1, 2)
# what is compared, rows, heads, width, ranks
CASES = (
    ("", 65536, 4, 32, 1),
    ("1/8 of them", 524288, 4, 32, 1),
    ("dense SDPA", 8192, 8, 64, 1),
    ("1 rank", 32768, 8, 64, 2),
)


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench dilated`."""
    parser = tables.add_parser(
        "dilated",
        parents=[common],
        help="dilated attention by length, beside dense SDPA, and on two ranks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--repeats", metavar="N", type=natural, default=3, help="timed calls of each (3)")
    parser.add_argument("--scale", metavar="N", type=natural, default=1, help="divides all lengths, 64 at most (1)")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for a scale that leaves too few rows."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.dilated import DilatedSizes, on_a_rank
    from ringopt.tools.common.command import CommandError

    if arguments.scale > 64:
        raise CommandError(f"--scale {arguments.scale}: the shortest segment has {LENGTHS[0]} rows; 64 at most")
    segments = tuple(length // arguments.scale for length in LENGTHS)
    rows: list[Row] = []
    for peer, length, heads, dim, ranks in progress.track(CASES, description="cases"):
        case = DilatedSizes(length // arguments.scale, heads, dim, segments, RATES, dense=peer == "dense SDPA")
        found = as_ranks(ranks, on_a_rank, case, arguments.repeats, timeout=3600.0)
        row: Row = {"beside": peer, "length": case.length, "heads": heads, "dim": dim, "ranks": ranks}
        row |= {key: max(rank[key] for rank in found) for key in ("seconds", "memory", "error", "sent")}
        other = found[0]["dense"] if peer == "dense SDPA" else rows[0]["seconds"] if rows else None
        if peer == "1 rank":
            other = max(alone["seconds"] for alone in as_ranks(1, on_a_rank, case, arguments.repeats, timeout=3600.0))
        row |= {"other": other, "ratio": row["seconds"] / other if other else None, "flops": FLOPS[peer]}
        rows.append(row)
    return Result(TITLE, COLUMNS, rows, _totals(rows), _sentences(rows), NOTES, KEYS)


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    return {"rows": len(rows), "wrong": sum(row["error"] > WRONG for row in rows)}


def _sentences(rows: list[Row]) -> tuple[str, ...]:
    _short, long, dense, two = rows
    return (
        f"8 times the rows take {long['ratio']:.2f} times as long; dilated attention of {dense['length']:,} rows takes "
        f"{dense['ratio']:.2f} of the time of dense attention, and has {dense['flops']:.3f} of its FLOPs",
        f"2 ranks are {1 / two['ratio']:.2f} times as fast as 1, and send {two['sent']:,} bytes",
    )


# FLOPs of a rank, over those of what is beside it. In dilated attention a row has 2048 + 4096 / 4 keys, in dense
# attention over 8192 rows as many: no kernel as fast as the dense one can take a smaller part of its time.
LEAST = sum(w / r**2 for w, r in zip(LENGTHS, RATES, strict=True)) / 8192
FLOPS = {"": None, "1/8 of them": 8.0, "dense SDPA": LEAST, "1 rank": 0.5}
TITLE = "Dilated attention, forward, float32, one thread a rank"
KEYS = ("beside", "length", "heads", "dim", "ranks")
COLUMNS = (
    Column("n", lambda row: f"{row['length']:,}"),
    Column("heads", lambda row: f"{row['heads']} of {row['dim']}"),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("s", lambda row: f"{row['seconds']:.2f}"),
    Column("beside", lambda row: row["beside"], right=False),
    Column("s", lambda row: "-" if row["other"] is None else f"{row['other']:.2f}"),
    Column("ratio", lambda row: "-" if row["ratio"] is None else f"{row['ratio']:.2f}"),
    Column("FLOPs", lambda row: "-" if row["flops"] is None else f"{row['flops']:.3g}"),
    Column("memory", lambda row: f"{row['memory']:.2f}"),
    Column("error", error("error")),
)
NOTES = (
    "s: the slowest rank's median. ratio, FLOPs: of a rank, over those of what is beside it.",
    "memory: peak above what was resident before, over the bytes of q, k and v.",
    "error: of 16 sampled rows of each rank, from their definition in float64.",
)
