"""Each kernel beside `F.scaled_dot_product_attention` on one device, and what a ring of virtual ranks on that device
costs before any link: the same attention in the blocks of a ring, merged; and whether keys and values can be copied to
the device beside it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ringopt.tools.benchmarks.lab.names import COPY, RING
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen, error, long_enough
from ringopt.tools.common.command import CommandError, natural

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench kernels --lengths 1024 --only flash_cpu ring
  ringopt bench kernels --device cuda --dtype bfloat16 --lengths 8192 65536 --json kernels.json
"""

DTYPES = ("float32", "bfloat16", "float16")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench kernels`."""
    parser = tables.add_parser(
        "kernels",
        parents=[common],
        help="kernels on one device, and the blocks of a ring, beside SDPA",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of q, k and v (float32)")
    parser.add_argument("--lengths", metavar="N", nargs="+", type=natural, default=[2048], help="tokens (2048)")
    parser.add_argument("--ranks", metavar="P", type=natural, default=8, help="virtual ranks of the ring (8)")
    parser.add_argument("--repeats", metavar="N", type=natural, default=5, help="timed calls of each, by turns (5)")
    parser.add_argument("--only", metavar="KERNEL", nargs="+", help="only these kernels, ring or copy")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for an unknown KERNEL, and where there is no such device."""
    import torch

    from ringopt.kernels.choose import KERNELS
    from ringopt.tools.benchmarks.workers.kernels import KernelCase, rows_of

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch sees no GPU here; leave it out, or install a build of torch for CUDA")
    long_enough(arguments.lengths, arguments.ranks)
    names = chosen(arguments.only, [*(kernel.name for kernel in KERNELS), RING, COPY])
    cases = [
        KernelCase(pattern, length, heads, arguments.dtype, arguments.device, arguments.ranks)
        for length in arguments.lengths
        for pattern in ("causal", "full")
        for heads in ((8, 8), (8, 2))
    ]
    rows: list[Row] = []
    refusals: dict[str, str] = {}
    for case in progress.track(cases, description="kernels"):
        rows += rows_of(case, names, arguments.repeats, refusals)
    title = f"Attention on one device: heads of 64, batch 1, {arguments.dtype}, {_device_name(arguments.device)}"
    return Result(title, COLUMNS, rows, _totals(rows), (), (*NOTES, *refusals.values()), KEYS)


def _device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _totals(rows: list[Row]) -> dict[str, Any]:
    from ringopt.tools.benchmarks.workers.kernels import TOLERANCE

    return {"rows": len(rows), "wrong": sum(row["error"] > TOLERANCE[row["dtype"]] for row in rows)}


def _milliseconds(key: str, heading: str) -> Column:
    return Column(f"{heading},\nms", lambda row: "-" if row[key] is None else f"{row[key] * 1e3:,.1f}")


def _ratio(key: str) -> Column:
    return Column("/ SDPA", lambda row: f"{row[key]:.2f}")


KEYS = ("pattern", "length", "heads", "dtype", "device", "ranks", "kernel")
COLUMNS = (
    Column("n", lambda row: str(row["length"])),
    Column("", lambda row: row["pattern"], right=False),
    Column("heads", lambda row: row["heads"]),
    Column("", lambda row: row["kernel"], right=False),
    _milliseconds("forward_seconds", "f"),
    _ratio("forward_ratio"),
    _milliseconds("backward_seconds", "b"),
    _ratio("backward_ratio"),
    Column("rate,\nf+b", lambda row: f"{row['rate']:.0%}"),
    _milliseconds("part_seconds", "part"),
    Column("hidden", lambda row: "-" if row["hidden"] is None else f"{row['hidden']:.0%}"),
    Column("error", error("error")),
)
NOTES = (
    "f: forward, b: backward; / SDPA: the time of F.scaled_dot_product_attention in the same run is 1.",
    "Medians, by turns.",
    "rate: how fast both are, where SDPA is 100%.",
    "ring: one virtual rank after the other, every block of its plan by the kernel that auto takes, merged; part: the "
    "merging of a forward.",
    "copy: SDPA, while K and V are copied to the device, as often as takes half its forward (on a GPU from pinned "
    "memory, by a stream of its own; on a CPU by another thread); part: the copy alone; hidden: (SDPA + copy - both) / "
    "the shorter.",
    "error: outputs and gradients, from float64 (from SDPA, beyond 4096 tokens), relative to the largest entry.",
)
