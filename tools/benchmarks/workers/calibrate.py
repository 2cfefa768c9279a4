"""What one rank measures for the profile of a machine, and the rates that fit it."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.executor.merge_lse import merge_
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.cost.choose import Case
from ringopt.cost.simulate import Heads, simulate
from ringopt.distributed.mesh import Mesh, Pending, PretendedMesh, register
from ringopt.hardware.devices import Link
from ringopt.hardware.rates import Rates, Speed
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows
from ringopt.kernels.choose import choose_kernel
from ringopt.tools.benchmarks.lab.inserted import inserted
from ringopt.tools.benchmarks.workers.overlap_rank import Mute, begin_rank, in_turns, nothing, together

HEADS, DIM = 8, 64
SIZES = (32, 64, 128, 256, 512, 1024, 2048)  # queries, and as many keys, of a tile
SHAPES = ("full", "causal", "masked")
DTYPES = (torch.float32, torch.bfloat16)
MANY, FEW = 16384, 64  # rows: of 32 MiB in all heads, and such that a call costs more than they do
MESSAGES = tuple(1 << power for power in range(12, 24))  # bytes
BUDGET = 0.15  # seconds for the repeats of one tile
COMPUTED = 2e-3  # seconds that are computed beside a message
Samples = list[tuple[float, float]]  # FLOPs or bytes, seconds


# ---- kernels ---------------------------------------------------------------------------------------------------------
def kernels_on_a_rank(rank: int, ranks: int) -> dict[str, Any]:
    """Samples by "kernel dtype way shape"; bytes/s of merging, and seconds of whole calls."""
    mesh = begin_rank()
    found: dict[str, Samples] = {}
    for name in ("flash_cpu", "math"):
        for dtype in DTYPES[: 1 if name == "math" else 2]:
            kernel, _ = choose_kernel(name, dtype, torch.device("cpu"), DIM, DIM)
            for shape in SHAPES:
                for way, samples in tile_samples(kernel, dtype, shape).items():
                    found[f"{name} {str(dtype).removeprefix('torch.')} {way} {shape}"] = samples
    return {"tiles": found, "touch": touch(), "calls": calls(mesh)}


def tile_samples(kernel: Kernel, dtype: torch.dtype, shape: str) -> dict[str, Samples]:
    """FLOPs and seconds of tiles of several sizes, forward and backward, from which rates are fitted."""
    found: dict[str, Samples] = {"forward": [], "backward": []}
    for size in SIZES:
        q, k, v, dout = (torch.randn(1, HEADS, size, DIM, dtype=dtype) for _ in range(4))
        mask = band(size, dtype) if shape == "masked" else None
        tile = TileInputs(q, k, v, DIM**-0.5, mask, shape == "causal")
        out, lse = kernel.forward(tile)
        rows, heads = WholeRows(dout, out.to(dtype), lse), Heads.of(q, k, v)
        pairs = size * (size + 1) // 2 if tile.causal else size * size
        ways: dict[str, Callable[[], object]] = {
            "forward": partial(kernel.forward, tile),
            "backward": partial(kernel.backward, tile, rows),
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
    """Bytes/s of a merge, which reads two results and writes one; of more than caches hold."""
    out, more = torch.randn(2, 1, HEADS, MANY, DIM)
    lse, other = torch.randn(2, 1, HEADS, MANY)
    return float(3 * out.nbytes / timed(lambda: merge_(out, lse, more, other)))


@dataclass(frozen=True)
class Call:
    """An attention of few rows whose messages go nowhere, so that its fixed cost can be measured."""

    ranks: int
    strategy: str
    layout: str = "contiguous"

    @property
    def case(self) -> Case:
        heads = Heads(1, HEADS, HEADS, DIM, DIM, 4, 4, "float32", "flash_cpu")
        return Case("full", FEW * self.ranks, FEW * self.ranks, heads, True)

    @property
    def plan(self) -> Plan:
        return self.case.plan(self.ranks, self.layout, self.strategy)

    def seconds(self, mesh: Mesh) -> tuple[float, float]:
        """Of the operator without a gradient, and of its backward."""
        sharded = ShardedPattern.of_self_attention("full", FEW * self.ranks, self.ranks, self.layout)
        attend = inserted(sharded, self.strategy, DIM**-0.5, mesh.name)
        q, k, v, dout = (torch.randn(1, HEADS, FEW, DIM) for _ in range(4))

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(q, k, v)

        def both() -> object:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(attend(*leaves), leaves, dout)

        first = timed(forward)
        return first, max(0.0, timed(both) - first)


# The first three differ in steps and tiles: 1 and 1, 2 and 2, 2 and 6 (of which 4 are a quarter, 2 a half) forward.
CALLS = {
    "one": Call(1, "ring"),
    "two": Call(2, "ring"),
    "six": Call(2, "ring", "zigzag"),
    "queries": Call(2, "ring_q"),
    "heads": Call(2, "ulysses"),
}


def calls(mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Seconds of each of CALLS, forward and backward."""
    quiet = Mute(mesh)
    register(quiet)
    return {name: call.seconds(PretendedMesh(0, 1) if call.ranks == 1 else quiet) for name, call in CALLS.items()}


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
    """Of two ranks: samples of messages both ways at once and one way; and compute, an exchange, and both together."""
    mesh, peer = begin_rank(), (rank + 1) % ranks
    x, largest = torch.randn(256, 256), MESSAGES[-1]

    def both_ways(size: int) -> Callable[[], Pending]:
        out, into = torch.zeros(2, size, dtype=torch.uint8)
        return lambda: mesh.exchange([(peer, out)], [(peer, into)], "calibrate")

    def one_way(size: int) -> Callable[[], Pending]:
        message = [(peer, torch.zeros(size, dtype=torch.uint8))]
        sends, receives = (message, []) if rank == 0 else ([], message)
        return lambda: mesh.exchange(sends, receives, "calibrate")

    def computed(seconds: float) -> Callable[[], None]:
        repeats = max(1, round(seconds / timed(lambda: x @ x)))

        def compute() -> None:
            for _ in range(repeats):
                x @ x

        return compute

    ways = {"both_ways": both_ways, "one_way": one_way}
    found = {name: link_samples(way, computed(COMPUTED)) for name, way in ways.items()}
    exchange, compute = both_ways(largest), computed(found["both_ways"][-1][1])
    runs: dict[str, Callable[[], object]] = {
        "compute": compute,
        "exchange": behind(exchange, nothing),
        "both": behind(exchange, compute),
    }
    return {**found, "beside": {name: min(one.seconds for one in turns) for name, turns in in_turns(runs, 7).items()}}


def link_samples(way: Callable[[int], Callable[[], Pending]], compute: Callable[[], None]) -> Samples:
    """What messages of each size take alone, or add to what is computed beside them: the larger. Medians, not the
    least: what delays messages, the waking of whoever moves them, is there in every program."""
    runs: dict[str, Callable[[], object]] = {"compute": compute}
    for size in MESSAGES:
        post = way(size)
        runs |= {f"{size} alone": behind(post, nothing), f"{size} beside": behind(post, compute)}
    seconds = {name: time.seconds for name, time in together(runs, 15).items()}
    added = {size: seconds[f"{size} beside"] - seconds["compute"] for size in MESSAGES}
    return [(float(size), max(seconds[f"{size} alone"], added[size])) for size in MESSAGES]


def behind(post: Callable[[], Pending], compute: Callable[[], None]) -> Callable[[], None]:
    """Messages that travel while something is computed, and then are waited for."""

    def run() -> None:
        pending = post()
        compute()
        pending.wait()

    return run


# ---- what fits -------------------------------------------------------------------------------------------------------
def rates_from(kernels: Sequence[dict[str, Any]], link: Sequence[dict[str, Any]]) -> Rates:
    """The slower of the ranks, everywhere."""
    wire = fitted([rank["both_ways"] for rank in link])
    queries = [size * HEADS for size in SIZES]
    speeds = {name: fitted([rank["tiles"][name] for rank in kernels], queries) for name in kernels[0]["tiles"]}
    bare = Rates(
        source=f"measured on {platform.node()}",
        link=Link("measured", wire.rate, wire.overhead, one_way_of(link)),
        default=speeds["flash_cpu float32 forward full"],
        speeds=speeds,
        touch=min(rank["touch"] for rank in kernels),
        overlap=min(hidden(**rank["beside"]) for rank in link),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (os.cpu_count() or 1),
    )
    measured = {
        name: tuple(max(rank["calls"][name][way] for rank in kernels) for way in (False, True)) for name in CALLS
    }
    return with_calls(with_tiles(bare, measured), measured)


def with_tiles(rates: Rates, measured: Mapping[str, Sequence[float]]) -> Rates:
    """With what the executor adds to each tile and each step, which is what is left of the times of calls."""
    left = {
        (name, way): measured[name][way] - predicted(name, rates, way)
        for name in ("one", "two", "six")
        for way in (False, True)
    }
    tile = [max(0.0, left["six", way] - left["two", way]) / 4 for way in (False, True)]
    speeds = {
        name: replace(speed, overhead=speed.overhead + tile[" backward " in name])
        for name, speed in rates.speeds.items()
    }
    default = replace(rates.default, overhead=rates.default.overhead + tile[False])
    step = max(0.0, left["two", False] - left["one", False] - tile[False])
    return replace(rates, speeds=speeds, default=default, step=step)


def with_calls(rates: Rates, measured: Mapping[str, Sequence[float]]) -> Rates:
    """With what is left of a call beside its tiles and steps, by what travels."""
    found = {}
    for what, name in {"keys": "two", "queries": "queries", "heads": "heads"}.items():
        for way in (False, True):
            direction = "backward" if way else "forward"
            found[f"{what} {direction}"] = max(0.0, measured[name][way] - predicted(name, rates, way))
    return replace(rates, calls=found)


def predicted(name: str, rates: Rates, backward: bool) -> float:
    """Of one of CALLS, over a link that costs nothing."""
    free = replace(rates, link=Link("none", 1e15, 0.0), calls={})
    return simulate(CALLS[name].plan, CALLS[name].case.heads, free, backward).seconds


def fitted(ranks: Sequence[Samples], queries: Sequence[int] = ()) -> Speed:
    """What fits the slower rank's seconds at each amount best, by least squares of relative errors: a rate, and an
    overhead and seconds a query (of `queries` at each amount) where these are above 0."""
    amounts = torch.tensor([amount for amount, _ in ranks[0]], dtype=torch.float64)
    seconds = torch.tensor([[s for _, s in samples] for samples in ranks], dtype=torch.float64).amax(0)
    terms = {"overhead": torch.ones_like(amounts)}
    if queries:
        terms["query"] = torch.tensor(queries, dtype=torch.float64)
    best, least = Speed(float((amounts / seconds).median())), float("inf")
    for names in (names for number in range(len(terms) + 1) for names in combinations(terms, number)):
        # The sum of all parts = seconds, each line divided by its seconds.
        lines = torch.stack([amounts, *map(terms.__getitem__, names)], 1) / seconds[:, None]
        found = torch.linalg.lstsq(lines, torch.ones(len(amounts), 1, dtype=torch.float64)).solution
        error, (each, *parts) = float((lines @ found - 1).square().sum()), found[:, 0].tolist()
        if each > 0 and min(parts, default=0.0) >= 0 and error < least:
            best, least = Speed(1 / each, **dict(zip(names, parts, strict=True))), error
    return best


def one_way_of(link: Sequence[dict[str, Any]]) -> float:
    """The part of the time of messages both ways that the same take one way, from a half to 1: the median of all
    sizes, each by the slower rank."""
    ways = ([rank[way] for rank in link] for way in ("one_way", "both_ways"))
    one, both = ([max(seconds for _, seconds in sizes) for sizes in zip(*ranks, strict=True)] for ranks in ways)
    part = statistics.median(float(a / b) for a, b in zip(one, both, strict=True))
    return min(1.0, max(0.5, part))


def hidden(compute: float, exchange: float, both: float) -> float:
    """The part of the shorter that took no time of its own."""
    return min(1.0, max(0.0, (compute + exchange - both) / min(compute, exchange)))
