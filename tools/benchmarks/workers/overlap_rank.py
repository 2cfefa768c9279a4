"""One rank of a ring attention over a link of known speed: compute alone, exchange alone, and both."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.buffers import KVShape
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.prove import prove
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import Mesh, Transfer
from ringopt.distributed.traffic import record_traffic
from ringopt.expr.mask import Mask
from ringopt.kernels.choose import choose_kernel
from ringopt.tools.benchmarks.lab.emulated_link import EmulatedLink
from ringopt.tools.benchmarks.lab.link_lab import Links
from ringopt.tools.benchmarks.lab.names import PASSES
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.sleeping import Sleeping
from ringopt.tools.benchmarks.lab.wrapped import Wrapped

HEADS, DIM = 4, 64
FAST = 10_000.0  # megabits a second: nothing waits for such a link
LONGEST = 60.0  # seconds of a turn of one case, forward and backward
OVERHEAD = 1.06  # bytes on the wire for each byte of a message


@dataclass(frozen=True)
class OverlapCase:
    """`slept`: blocks take their time, but no processor (tools/benchmarks/lab/sleeping.py). `hoisted`: as part
    of a compiled model (overlap_compiled.py)."""

    pattern: str
    length: int
    ranks: int
    slept: bool = False
    hoisted: bool = False

    @property
    def plan(self) -> Exchange:
        layout = "zigzag" if self.pattern == "causal" else "contiguous"
        return exchange_of(ShardedPattern.of_self_attention(self.pattern, self.length, self.ranks, layout), "ring")


class Mute(Wrapped):
    """Sends nothing: what arrives is zeros."""

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        for _, buffer in receives:
            buffer.zero_()
        return []


class Rank:
    """One rank's part of a case."""

    def __init__(self, case: OverlapCase, mesh: Mesh):
        self.case, self.mesh, self.plan = case, mesh, case.plan
        prove(self.plan, mesh.rank)
        kernel, _ = choose_kernel("auto", torch.float32, torch.device("cpu"), DIM, DIM)
        self.attention = Attention(self.plan, Mask(), kernel, DIM**-0.5)
        self.timed = replace(self.attention, kernel=Sleeping()) if case.slept else self.attention
        torch.manual_seed(0)
        self.whole = [torch.randn(1, HEADS, case.length, DIM) for _ in range(4)]
        q, k, v, self.dout = map(self.rows, self.whole)
        self.given = Operands(q, k, v)
        self.saved = Saved(self.given, *attend(self.attention, mesh, self.given))

    def rows(self, x: Tensor) -> Tensor:
        pieces = self.plan.q_layout.ranges(self.mesh.rank)
        return torch.cat([x[:, :, rows.start : rows.stop] for rows in pieces], 2)

    def run(self, mesh: Mesh, backward: bool) -> list[Tensor]:
        """What is timed."""
        return self.attend(self.timed, mesh, backward)

    def others(self, link: Mesh, backward: bool) -> dict[str, Callable[[], object]]:
        """What is timed beside it."""
        return {}

    def attend(self, attention: Attention, mesh: Mesh, backward: bool) -> list[Tensor]:
        if backward:
            return list(attend_backward(attention, mesh, self.dout, self.saved)[:3])
        return [attend(attention, mesh, self.given)[0]]

    def alone(self, backward: bool, repeats: int) -> tuple[float, int]:
        """Seconds of compute and bytes sent, of the rank that has most of each."""
        found = together({"compute": lambda: self.run(Mute(self.mesh), backward)}, repeats)
        most = torch.tensor([found["compute"].seconds, self.bytes_sent(backward)], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most[0]), int(most[1])

    def measured(self, link: Mesh, backward: bool, repeats: int) -> dict[str, Any]:
        exposed: list[float] = []

        def both() -> None:
            with record_traffic() as traffic:
                self.run(link, backward)
            exposed.append(traffic.blocked)

        runs: dict[str, Callable[[], object]] = {
            "compute": lambda: self.run(Mute(self.mesh), backward),
            "exchange": lambda: self.exchange(link, backward),
            "total": both,
            **self.others(link, backward),
        }
        found = together(runs, repeats)
        facts = {"pass": PASSES[backward], "bytes": self.bytes_sent(backward), "error": self.error(backward)}
        facts |= {"moving": found["exchange"].processor, "exposed": statistics.median(exposed[1:])}
        return {"written": None, **{name: times.seconds for name, times in found.items()}, **facts}

    def exchange(self, link: Mesh, backward: bool) -> None:
        shape = KVShape.of(self.given.k, self.given.v)
        for number, step in enumerate(self.plan.steps(self.mesh.rank, backward)):
            sends = [(message.target, shape.empty(message.rows).flat) for message in step.sends]
            receives = [(message.source, shape.empty(message.rows).flat) for message in step.receives]
            link.exchange(sends, receives, f"alone {number}").wait()

    def bytes_sent(self, backward: bool) -> int:
        shape = KVShape.of(self.given.k, self.given.v)
        sent = [m.rows for step in self.plan.steps(self.mesh.rank, backward) for m in step.sends]
        return sum(shape.empty(rows).flat.nbytes for rows in sent)

    def error(self, backward: bool) -> float:
        q, k, v = (x.clone().requires_grad_() for x in self.whole[:3])
        expected = [F.scaled_dot_product_attention(q, k, v, is_causal=self.case.pattern == "causal")]
        if backward:
            expected = list(torch.autograd.grad(expected, (q, k, v), self.whole[3]))
        return distance(self.attend(self.attention, self.mesh, backward), [self.rows(x.detach()) for x in expected])


def begin_rank() -> Mesh:
    """The mesh of all processes, over gloo, one thread a rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return process_mesh()


def set_rate(mesh: Mesh, links: Links | None, rate: float | None) -> Mesh:
    """`mesh` with links of `rate` bytes a second, as fast as they can be where it is None: of `links`, which rank 0
    shapes for all, or emulated ones."""
    if links is None:
        return mesh if rate is None else EmulatedLink(mesh, rate)
    dist.barrier()
    if mesh.rank == 0:
        links.set_rate(FAST if rate is None else rate * OVERHEAD * 8 / 1e6)
    dist.barrier()
    return mesh


@dataclass(frozen=True)
class Times:
    """Of one run, on the wall clock and of this process on all processors."""

    seconds: float
    processor: float


def together(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """Medians."""
    return {
        name: Times(statistics.median(one.seconds for one in found), statistics.median(one.processor for one in found))
        for name, found in in_turns(runs, repeats).items()
    }


def in_turns(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[Times]]:
    """The times of each run, all ranks starting at once. The first turn is for warming up."""
    times: dict[str, list[Times]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            run()
            times[name].append(Times(time.perf_counter() - start, time.process_time() - used))
    return {name: found[1:] for name, found in times.items()}


def nothing() -> None:
    """What one rank runs in a turn of others."""
