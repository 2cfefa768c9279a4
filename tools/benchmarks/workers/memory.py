"""One rank's part of `ringopt bench memory`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.queues import Queue
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Layout, layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.context_parallel.plan.strategies import MERGE
from ringopt.cost.choose import Case
from ringopt.cost.memory import Memory, memory_of
from ringopt.cost.simulate import Heads
from ringopt.distributed.mesh import Mesh, Transfer
from ringopt.errors import OptionError
from ringopt.tools.benchmarks.lab.inserted import inserted
from ringopt.tools.benchmarks.lab.memory_peers import Peer, peers
from ringopt.tools.benchmarks.lab.names import FEW, PATTERNS, STRATEGIES
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.peers import Run
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes
from ringopt.tools.benchmarks.workers.overlap_rank import Mute, begin_rank

HEADS = Heads(1, 8, 8, 64, 64, 4, 4, "float32", "flash_cpu")


class Alone(Mute):
    """One rank of a mesh whose others say what it says: for what it holds, the numbers do not matter."""

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        """As gloo does it, by way of a buffer of its own."""
        gathered = torch.stack([x] * self.size)
        return list(gathered if self.gathers_in_place else gathered.clone())

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return x.clone()

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        return Transfer(label, Done())

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        return self._all_gather(x, label), Transfer(label, Done())


class Done:
    """Of a message that nobody sends."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class Planned:
    """An attention, and a strategy that can do it."""

    case: Case
    strategy: str
    plan: Plan

    trains: ClassVar[bool] = True
    calls: ClassVar[int] = 1

    @property
    def label(self) -> str:
        return f"{FEW} queries" if self.case.whole else self.case.pattern.partition("(0,")[0]

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Of queries and of keys."""
        return self.plan.q_layout, self.plan.kv_layout

    def on(self, mesh: Mesh) -> Run:
        """What the compiler inserts."""
        case, (queries, keys) = self.case, self.layouts
        sharded = ShardedPattern(case.pattern, case.q_length, case.kv_length, mesh.size, queries.name, keys.name)
        return inserted(sharded, self.strategy, case.heads.key_dim**-0.5, mesh.name)


def on_a_rank(rank: int, ranks: int, length: int, done: Queue[str]) -> list[Row]:
    """The rows of one rank; rank 0 puts each into `done`."""
    mesh, rows = begin_rank(), list[Row]()
    for each in everyone(ranks, length):
        rows.append(row_of(mesh, each) | {"error": error(mesh, each)})
        if rank == 0:
            done.put(f"{ranks} ranks, {each.label}, {each.strategy}")
    return rows


def everyone(ranks: int, length: int) -> Iterator[Planned | Peer]:
    """Every attention of the table: ringopt's strategies, then those of other libraries."""
    yield from planned(ranks, length, HEADS, list(PATTERNS.items()))
    yield from peers(ranks, length, HEADS, list(PATTERNS))


def planned(ranks: int, length: int, heads: Heads, patterns: Sequence[tuple[str, str]]) -> Iterator[Planned]:
    """Every strategy that can do the pattern in the layout; of documents, one a rank, that need no exchange; and of
    queries that all ranks have."""
    edges = [layout_of("contiguous", length, ranks).edge(rank) for rank in range(ranks + 1)]
    alone = (f"documents({','.join(map(str, edges))})", "contiguous")
    cases = [(Case(pattern, length, length, heads, True), layout) for pattern, layout in (*patterns, alone)]
    for case, layout in (*cases, (Case("full", FEW, length, heads, True, whole="queries"), "contiguous")):
        for strategy in STRATEGIES if not case.whole else (MERGE,):
            with suppress(OptionError):  # it is none for this pattern
                yield Planned(case, strategy, case.plan(ranks, layout, strategy))


def row_of(mesh: Mesh, each: Planned | Peer) -> Row:
    """On this rank. What a peer holds is not predicted."""
    predicted: Memory | None = None
    if isinstance(each, Planned):
        predicted = memory_of(each.plan, each.case.heads, mesh.rank, not mesh.gathers_in_place)
    return {
        "pattern": each.label, "strategy": each.strategy, "ranks": mesh.size,
        "forward": held(mesh, each, False), "training": held(mesh, each, True) if each.trains else None,
        "forward predicted": predicted and predicted.forward, "training predicted": predicted and predicted.training,
    }  # fmt: skip


def held(mesh: Mesh, each: Planned | Peer, training: bool) -> int:
    """The most bytes of a call, and in training of its backward, beside their operands. Of a peer the least of a few
    calls: where a thread of gloo is the last to let go of a message, nobody counts that it is freed."""
    given, run = own(mesh, each, whole(each.case)), each.on(mesh)
    return min(peak_bytes(lambda: called(run, given, training)) for _ in range(each.calls))


def called(run: Run, given: Sequence[Tensor], training: bool) -> list[Tensor]:
    """The output, or the gradients of q, k and v."""
    *operands, dout = given
    if not training:
        with torch.no_grad():
            return [run(*operands)]
    leaves = [x.detach().requires_grad_() for x in operands]
    return list(torch.autograd.grad(run(*leaves), leaves, dout))


def error(mesh: Mesh, each: Planned | Peer) -> float:
    """Of the output and the gradients, where there are, of this rank's rows, from one process."""
    given, run = own(mesh, each, whole(each.case)), each.on(mesh)
    ways = (False, True) if each.trains else (False,)
    found = [tensor for training in ways for tensor in called(run, given, training)]
    if each.strategy == MERGE:  # every rank has a part of the gradient of the queries that all have
        found[1] = mesh.all_reduce(found[1], "dq")
    *gradients, out = own(mesh, each, on_one_process(each.case))
    return distance(found, [out, *gradients][: len(found)])


def own(mesh: Mesh, each: Planned | Peer, tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's rows of four tensors, of which the second and the third are of keys. As projections leave them, heads
    beside one another in each row."""
    queries, keys = each.layouts
    pairs = zip(tensors, (queries, keys, keys, queries), strict=True)
    return [
        torch.cat([x.transpose(1, 2)[:, rows.start : rows.stop] for rows in layout.ranges(mesh.rank)], 1).transpose(
            1, 2
        )
        for x, layout in pairs
    ]


@lru_cache(maxsize=8)
def whole(case: Case) -> list[Tensor]:
    """q, k, v and the gradient that comes in, of all rows, the same on all ranks."""
    heads, draw = case.heads, torch.Generator().manual_seed(0)
    queries, keys = (heads.q_heads, case.q_length), (heads.kv_heads, case.kv_length)
    sizes = ((heads.batch, *side, heads.key_dim) for side in (queries, keys, keys, queries))
    return [torch.randn(*size, dtype=getattr(torch, heads.dtype), generator=draw) for size in sizes]


@lru_cache(maxsize=8)
def on_one_process(case: Case) -> list[Tensor]:
    """The gradients of q, k and v, and the output, of all rows."""
    *operands, dout = whole(case)
    q, k, v = leaves = [x.clone().requires_grad_() for x in operands]
    mask = seen(pattern_of(case.pattern, case.q_length, case.kv_length), range(case.q_length), range(case.kv_length))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return [*torch.autograd.grad(out, leaves, dout), out.detach()]
