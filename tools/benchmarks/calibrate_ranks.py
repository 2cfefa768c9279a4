"""What one rank measures for the profile of a machine, and the rates that fit it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.attention.exchange import exchange_of
from ringopt.attention.execute import Attention, Operands
from ringopt.attention.merge import merge_
from ringopt.attention.predict import Heads
from ringopt.attention.run import attend
from ringopt.cost.hardware import Link
from ringopt.cost.rates import Rates, Speed
from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.graph.mask import Mask
from ringopt.kernels.base import HIDDEN, Kernel
from ringopt.kernels.choose import choose
from ringopt.tools.benchmarks.on_a_link import Mute, begin, in_turns

HEADS, DIM = 8, 64
SIZES = (32, 64, 128, 256, 512, 1024)  # queries, and as many keys, of a tile
SHAPES = ("full", "causal", "masked")
DTYPES = (torch.float32, torch.bfloat16)
MESSAGES = tuple(1 << power for power in range(12, 24))  # bytes
BUDGET = 0.15  # seconds for the repeats of one tile
Samples = list[tuple[float, float]]  # FLOPs or bytes, seconds


# ---- kernels ---------------------------------------------------------------------------------------------------------
def kernels_on_a_rank(rank: int, ranks: int) -> dict[str, Any]:
    """Samples by "kernel dtype way shape"; seconds of merging, of a call and of a step."""
    mesh = begin()
    found: dict[str, Samples] = {}
    for name in ("flash_cpu", "math"):
        for dtype in DTYPES[: 1 if name == "math" else 2]:
            kernel, _ = choose(name, dtype, torch.device("cpu"), DIM, DIM)
            for shape in SHAPES:
                for way, samples in tile_samples(kernel, dtype, shape).items():
                    found[f"{name} {str(dtype).removeprefix('torch.')} {way} {shape}"] = samples
    return {"tiles": found, "touch": touch(), **executor(mesh)}


def tile_samples(kernel: Kernel, dtype: torch.dtype, shape: str) -> dict[str, Samples]:
    found: dict[str, Samples] = {"forward": [], "backward": []}
    for size in SIZES:
        q, k, v, dout = (torch.randn(1, HEADS, size, DIM, dtype=dtype) for _ in range(4))
        causal, scale = shape == "causal", DIM**-0.5
        mask = band(size, dtype) if shape == "masked" else None
        out, lse = kernel.forward(q, k, v, mask, causal, scale)
        out, heads = out.to(dtype), Heads.of(q, k, v)
        pairs = size * (size + 1) // 2 if causal else size * size
        ways: dict[str, Callable[[], object]] = {
            "forward": lambda: kernel.forward(q, k, v, band(size, dtype) if mask is not None else None, causal, scale),  # noqa: B023
            "backward": lambda: kernel.backward(dout, q, k, v, out, lse, mask, causal, scale),  # noqa: B023
        }
        for way, run in ways.items():
            found[way].append((heads.flops(pairs, way == "backward"), timed(run)))
    return found


def band(size: int, dtype: torch.dtype) -> Tensor:
    """A mask as the executor makes one: who sees whom, then what is added."""
    rows = torch.arange(size)
    seen = rows - rows[:, None] <= 0
    return torch.where(seen, 0.0, torch.full((), HIDDEN)).to(dtype)[None, None]


def touch() -> float:
    """Bytes/s of a merge, which reads two results and writes one."""
    out, more = torch.randn(2, 1, HEADS, 1024, DIM)
    lse, other = torch.randn(2, 1, HEADS, 1024)
    return float(3 * out.nbytes / timed(lambda: merge_(out, lse, more, other)))


def executor(mesh: Mesh) -> dict[str, float]:
    """Seconds of a call of one tile, and of one of two tiles in two steps whose messages go nowhere."""
    kernel, _ = choose("auto", torch.float32, torch.device("cpu"), DIM, DIM)
    size, quiet = SIZES[0], Mute(mesh)

    def call(ranks: int, where: Mesh) -> Callable[[], object]:
        plan = exchange_of("full", ranks * size, ranks * size, ranks, "contiguous", "contiguous", "ring")
        q, k, v = (torch.randn(1, HEADS, size, DIM) for _ in range(3))
        given = Operands(q, k, v)
        attention = Attention(plan, Mask(), kernel, DIM**-0.5)
        return lambda: attend(attention, where, given)

    return {"one": timed(call(1, PretendedMesh(0, 1))), "two": timed(call(2, quiet))}


def timed(run: Callable[[], object]) -> float:
    """The least of as many runs as BUDGET allows, 3 at least: what else the machine does only adds."""
    run()
    first = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < 3 or (time.perf_counter() - first < BUDGET and len(seconds) < 200):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# ---- the link --------------------------------------------------------------------------------------------------------
def link_on_a_rank(rank: int, ranks: int) -> dict[str, Any]:
    """Samples of an exchange with the next rank, both ways at once; and compute, an exchange, and both together."""
    mesh = begin()

    def exchange(size: int) -> Callable[[], object]:
        out, into = torch.zeros(2, size, dtype=torch.uint8)
        peer = (rank + 1) % ranks
        return lambda: mesh.exchange([(peer, out)], [((rank - 1) % ranks, into)], "calibrate").wait()

    runs = {str(size): exchange(size) for size in MESSAGES}
    samples = [(float(size), seconds) for size, seconds in zip(MESSAGES, least(runs, 15).values(), strict=True)]
    x, largest = torch.randn(256, 256), MESSAGES[-1]
    out, into = torch.zeros(2, largest, dtype=torch.uint8)

    def compute() -> None:
        for _ in range(repeats):
            x @ x

    def both() -> None:
        pending = mesh.exchange([((rank + 1) % ranks, out)], [((rank - 1) % ranks, into)], "calibrate")
        compute()
        pending.wait()

    repeats = max(1, round(samples[-1][1] / timed(lambda: x @ x)))
    beside = least({"compute": compute, "exchange": exchange(largest), "both": both}, 7)
    return {"link": samples, "beside": beside}


def least(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    return {name: min(one.seconds for one in found) for name, found in in_turns(runs, repeats).items()}


# ---- what fits -------------------------------------------------------------------------------------------------------
def rates_from(kernels: Sequence[dict[str, Any]], link: Sequence[dict[str, Any]]) -> Rates:
    """The slower of the ranks, everywhere."""
    speeds = {name: fitted([rank["tiles"][name] for rank in kernels]) for name in kernels[0]["tiles"]}
    default = speeds["flash_cpu float32 forward full"]
    one, two = (max(rank[name] for rank in kernels) for name in ("one", "two"))
    tile = default.seconds(Heads(1, HEADS, HEADS, DIM, DIM, 4, 4, "float32", "").flops(SIZES[0] ** 2, False))
    step = max(0.0, two - one - tile)
    wire = fitted([rank["link"] for rank in link])
    return Rates(
        source=f"measured on {platform.node()}",
        link=Link("measured", wire.rate, wire.overhead),
        default=default,
        speeds=speeds,
        touch=min(rank["touch"] for rank in kernels),
        overlap=min(hidden(**rank["beside"]) for rank in link),
        call=max(0.0, one - tile - step),
        step=step,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1),
    )


def fitted(ranks: Sequence[Samples]) -> Speed:
    """Overhead and rate of the least squares of relative errors, through the slower rank's seconds at each amount."""
    amounts = torch.tensor([amount for amount, _ in ranks[0]], dtype=torch.float64)
    seconds = torch.tensor([[s for _, s in samples] for samples in ranks], dtype=torch.float64).amax(0)
    # a + b * amount = seconds, each line divided by its seconds; an overhead below 0 is none.
    lines = torch.stack([1 / seconds, amounts / seconds], 1)
    overhead, each = torch.linalg.lstsq(lines, torch.ones(len(amounts), 1, dtype=torch.float64)).solution[:, 0].tolist()
    if overhead < 0 or each <= 0:
        overhead, each = 0.0, float((seconds / amounts).median())
    return Speed(1 / each, overhead)


def hidden(compute: float, exchange: float, both: float) -> float:
    """The part of the shorter that took no time of its own."""
    return min(1.0, max(0.0, (compute + exchange - both) / min(compute, exchange)))
