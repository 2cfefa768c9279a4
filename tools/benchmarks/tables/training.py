"""A training step of a Llama-shaped model: peak memory of a rank by how many there are."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.result import Column, Result, Row
from ringopt.tools.common.command import natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench training --length 2048 --ranks 2 --checkpoints
  ringopt bench training --json training.json
"""

MIB = 2**20


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench training`."""
    parser = tables.add_parser(
        "training",
        parents=[common],
        help="peak memory of a training step by the number of ranks, with and without checkpoints of layers",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--length", metavar="N", type=natural, default=8192, help="of the sequence (8192)")
    parser.add_argument("--layers", metavar="N", type=natural, default=8, help="of the model (8)")
    parser.add_argument("--heads", metavar="N", type=natural, default=2, help="of 64, two to a KV head (2)")
    parser.add_argument("--ranks", metavar="P", nargs="+", type=natural, default=[2, 4], help="after one process (2 4)")
    parser.add_argument("--checkpoints", action="store_true", help="then the same with every layer a checkpoint")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises LabError where a rank fails, for want of memory for example."""
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks
    from ringopt.tools.benchmarks.workers.training import HEAD, on_a_rank

    model = (arguments.length, arguments.layers, arguments.heads * HEAD)
    kinds = (False, True) if arguments.checkpoints else (False,)
    cases = [(checkpointed, ranks) for checkpointed in kinds for ranks in (1, *arguments.ranks)]
    size: Row = {"length": arguments.length, "layers": arguments.layers, "heads": arguments.heads}
    rows: list[Row] = []
    alone: dict[bool, Row] = {}
    for checkpointed, ranks in progress.track(cases, description="steps"):
        found = as_ranks(ranks, on_a_rank, *model, checkpointed, "ring", timeout=3600.0)
        one = alone.setdefault(checkpointed, found[0])
        row = {**size, "checkpointed": checkpointed, "ranks": ranks}
        row["sent"] = sum(rank["sent"] for rank in found) / ranks
        row |= {key: max(rank[key] for rank in found) for key in ("bytes", "seconds", "compared")}
        row["error"] = max(abs(rank["loss"] / one["loss"] - 1) for rank in found)
        rows.append(row | {"share": row["bytes"] / one["bytes"] * ranks})
    title = _title(arguments.length, arguments.layers, arguments.heads * HEAD)
    return Result(title, COLUMNS, rows, _totals(rows), _sentences(rows), NOTES, KEYS)


def _title(length: int, layers: int, width: int) -> str:
    return (
        f"A training step, Llama-shaped: {layers} layers, width {width}, {length:,} tokens, float32, one thread a rank"
    )


def _totals(rows: list[Row]) -> Row:
    from ringopt.tools.benchmarks.lab.numbers import WRONG

    return {
        "rows": len(rows),
        "most": max(row["share"] for row in rows),
        "wrong": sum(row["error"] > WRONG for row in rows),
    }


def _sentences(rows: list[Row]) -> tuple[str, ...]:
    kept, again = ([row for row in rows if row["checkpointed"] is kind] for kind in (False, True))
    most = max(abs(row["share"] - 1) for row in kept)
    sentence = f"without checkpoints, the peak of a rank is that of one process over their number, within {most:.0%}"
    if not again:
        return (sentence,)
    gains = [f"{one['bytes'] / other['bytes']:.1f} on {one['ranks']}" for one, other in zip(kept, again, strict=True)]
    return sentence, f"checkpoints divide the peak by {', '.join(gains)} ranks"


KEYS = ("length", "layers", "heads", "checkpointed", "ranks")
COLUMNS = (
    Column("layers", lambda row: "checkpointed" if row["checkpointed"] else "kept", right=False),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("peak,\nMiB", lambda row: f"{row['bytes'] / MIB:,.0f}"),
    Column("of one process\ndivided by ranks", lambda row: f"{row['share']:.0%}"),
    Column("s", lambda row: f"{row['seconds']:.1f}"),
    Column("batches\ncompared in", lambda row: f"{row['compared'] / row['seconds']:.2%}"),
    Column("sent,\nMiB", lambda row: f"{row['sent'] / MIB:,.0f}"),
    Column("error", lambda row: f"{row['error']:.0e}"),
)
NOTES = (
    "peak: resident memory of the second step above what was resident before it, of the rank that has most.",
    "batches compared in: of the step, the part that digests of the inputs take, and waiting for those of the others.",
    "error: of the loss, from that of one process, relative.",
)
