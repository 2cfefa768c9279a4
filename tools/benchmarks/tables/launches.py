"""What one rank launches, sends and reads back on a GPU for the attention of some layers, forward and backward: counted
without one, on tensors that have sizes and no numbers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen
from ringopt.tools.common.command import CommandError, natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench launches
  ringopt bench launches --heads 32 --kv-heads 8 --tokens-per-rank 8192 --world-size 8 --mask padding --layers 4
"""


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench launches`."""
    parser = tables.add_parser(
        "launches",
        parents=[common],
        help="what an attention launches, sends and reads back on a GPU, counted without one",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hardware", default="h100", help="a GPU of the table of data sheets (h100)")
    parser.add_argument("--heads", metavar="N", type=natural, default=32, help="query heads, of 128 (32)")
    parser.add_argument("--kv-heads", metavar="N", type=natural, default=8, help="KV heads (8)")
    parser.add_argument("--tokens-per-rank", metavar="N", type=natural, default=8192, help="(8192)")
    parser.add_argument("--world-size", metavar="P", type=natural, default=8, help="ranks (8)")
    parser.add_argument("--rank", metavar="R", type=int, default=3, help="the one that is counted (3)")
    parser.add_argument("--layers", metavar="N", type=natural, default=1, help="that share a mask (1)")
    parser.add_argument("--strategy", default="ring", help="(ring)")
    parser.add_argument("--mask", metavar="MASK", nargs="+", help="only these")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for an unknown MASK or rank, and where no fake device can be had; OptionError for hardware
    and strategies that are none."""
    from ringopt.hardware.devices import device_of
    from ringopt.tools.benchmarks.lab.fake_cuda import missing
    from ringopt.tools.benchmarks.workers.launches import MASKS, Shape, launched, on_the_host

    if device_of(arguments.hardware).limits != device_of("h100").limits:
        raise CommandError(f"--hardware {arguments.hardware}: it is no GPU")
    if why := missing():
        raise CommandError(why)
    if not 0 <= arguments.rank < arguments.world_size:
        raise CommandError(f"--rank {arguments.rank}: there are {arguments.world_size} ranks, from 0 on")
    rows: list[Row] = []
    for mask in progress.track(chosen(arguments.mask, MASKS), description="launches"):
        layout = "contiguous" if mask == "window" else "zigzag"
        shape = Shape(
            mask,
            arguments.heads,
            arguments.kv_heads,
            tokens=arguments.tokens_per_rank,
            ranks=arguments.world_size,
            layout=layout,
            strategy=arguments.strategy,
            layers=arguments.layers,
        )
        of_all = {"mask": mask, "layout": layout, "strategy": arguments.strategy}
        for row, host in zip(launched(shape, arguments.rank), on_the_host(shape, arguments.rank), strict=True):
            rows.append({**of_all, **row, "host_s": host})
    title = (
        f"Rank {arguments.rank} of {arguments.world_size}: {arguments.tokens_per_rank} tokens, {arguments.heads} heads "
        f"of 128 over {arguments.kv_heads}, bfloat16, {arguments.layers} layer{'s' if arguments.layers > 1 else ''}"
    )
    return Result(title, COLUMNS, rows, {"rows": len(rows)}, (), NOTES, KEYS)


def _number(key: str, heading: str) -> Column:
    return Column(heading, lambda row: f"{row[key]:,}")


def _megabytes(row: dict[str, Any]) -> str:
    return f"{row['bytes'] / 2**20:,.0f}"


KEYS = ("mask", "layout", "strategy", "way")
COLUMNS = (
    Column("mask", lambda row: row["mask"], right=False),
    Column("layout", lambda row: row["layout"], right=False),
    Column("", lambda row: row["way"], right=False),
    _number("attention", "attention\ncalls"),
    _number("others", "other\nlaunches"),
    _number("reads", "host\nreads"),
    _number("copies", "copies\nto host"),
    _number("batches", "message\nbatches"),
    Column("sent,\nMiB", _megabytes),
    Column("host,\nms", lambda row: f"{row['host_s'] * 1e3:.1f}"),
)
NOTES = (
    "attention calls: of FlashAttention-2, of memory-efficient attention where a block has a mask, and of kernels in "
    "Triton where scores are changed or weights dropped.",
    "other launches: operations of ATen that compute or copy; views and allocations are none.",
    "host reads: of numbers from the device, each of which waits for all that was launched before. Of a mask all is "
    "taken for seen. copies to host: asynchronous, of what a mask reads, for all layers and their backwards.",
    "host: Python and dispatch of one layer on this machine's CPU, on tensors of next to nothing.",
)
