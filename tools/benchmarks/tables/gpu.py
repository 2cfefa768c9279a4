"""Whether ringopt is right and fast on this GPU, a verdict a line; without one the same in small on the CPU, so that
the command is known to run.

  kernels    every adapter against matrix products in float32, in bfloat16
  sums       results of tiles merged in one launch
  ranks      eight virtual ranks in this process, whose messages are copies that nothing orders but events, every
             strategy under every mask, forward and backward
  compiled   a small decoder through torch.compile, with CUDA graphs too
  speed      rank 3 of 8 with copies in place of a link, beside one call of SDPA that computes as much; with what it
             takes and holds beside the prediction (prediction, memory)
  processes  with --ranks: attentions and the decoder on processes, one a GPU, by NCCL (on the CPU by gloo); where there
             are fewer GPUs they share them, and NCCL takes them for nodes: right or wrong, but no measure of speed
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ringopt.tools.benchmarks.lab.names import TIMEOUT
from ringopt.tools.benchmarks.lab.result import Column, Result, Row, chosen, error
from ringopt.tools.common.command import two_or_more

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.progress import Progress

EXAMPLES = """\
examples:
  ringopt bench gpu --json gpu.json
  ringopt bench gpu --ranks 8
  compute-sanitizer ringopt bench gpu --only kernels sums
"""

PARTS = ("kernels", "sums", "ranks", "compiled", "speed")


def add(tables: _SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser) -> None:
    """Adds `ringopt bench gpu`."""
    parser = tables.add_parser(
        "gpu",
        parents=[common],
        help="is it right and fast on this GPU: a verdict a line, in ten minutes at most",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PART", nargs="+", help=f"only these of {', '.join(PARTS)}")
    parser.add_argument("--ranks", metavar="P", type=two_or_more, help="on processes, in place of these parts")
    parser.set_defaults(measure=measure)


def measure(arguments: argparse.Namespace, progress: Progress) -> Result:
    """Raises CommandError for an unknown PART, and where a rank fails or hangs."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.ranks:
        rows = _on_processes(arguments.ranks, device.type == "cuda")
    else:
        rows = list(_in_one_process(chosen(arguments.only, PARTS), progress))
    counts = {name: sum(row["verdict"] == name for row in rows) for name in ("right", "wrong", "not run")}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU, in small: no GPU is here"
    sentence = f"{counts['right']} right, {counts['wrong']} wrong, {counts['not run']} not run"
    return Result(f"ringopt on {name}, bfloat16", COLUMNS, rows, counts, (sentence,), NOTES, KEYS)


def _in_one_process(parts: list[str], progress: Progress) -> Iterator[Row]:
    import torch

    from ringopt.tools.benchmarks.gpu import checks, compiled, speed

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    large = device.type == "cuda"
    task = progress.add_task("ringopt bench gpu", total=None)
    if "kernels" in parts:
        yield from checks.kernels(device, 512 if large else 48)
    if "sums" in parts:
        yield from checks.merging(device, 4096 if large else 64)
    if "ranks" in parts:
        yield from checks.ranks(device, 4096 if large else 96, 8, lambda: progress.advance(task))
    if "compiled" in parts:
        yield from compiled.compiled(device, 2048 if large else 32)
    if "speed" in parts:
        heads = ((32, 8), (32, 32)) if large else ((4, 2),)
        yield from speed.speed(device, (8192, 32768) if large else (64,), heads)


def _on_processes(ranks: int, on_gpus: bool) -> list[Row]:
    from ringopt.tools.benchmarks.gpu.processes import on_rank, worst
    from ringopt.tools.benchmarks.lab.link_lab import as_ranks

    return worst(as_ranks(ranks, on_rank, on_gpus, 4096 if on_gpus else 96, timeout=10 * TIMEOUT))


KEYS = ("part", "what")
COLUMNS = (
    Column("", lambda row: row["part"], right=False),
    Column("", lambda row: row["what"], right=False),
    Column("verdict", lambda row: row["verdict"], right=False),
    Column("error", error("error")),
    Column("", lambda row: row["figure"] or row["why"], right=False),
)
NOTES = (
    "error: outputs and gradients, from float32, relative to the largest entry.",
    "reached: at least 95% of the speed of one call that computes as much; there is no link, so messages cost a copy.",
    "prediction: by the data sheet, or by what `ringopt bench --calibrate` measured; of all ranks, with their link.",
)
