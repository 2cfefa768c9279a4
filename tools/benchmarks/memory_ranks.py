"""One rank's part of `ringopt bench memory`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.queues import Queue
from typing import Any

import torch
from torch import Tensor

from ringopt.attention.choose import Case
from ringopt.attention.layouts import layout_of
from ringopt.attention.memory import memory_of
from ringopt.attention.plans import Plan
from ringopt.attention.predict import Heads
from ringopt.attention.routes import MERGE
from ringopt.attention.rows import count
from ringopt.distributed.mesh import Mesh, Transfer
from ringopt.errors import OptionError
from ringopt.ops.ring import VERSION
from ringopt.tools.benchmarks.memory import FEW, PATTERNS, STRATEGIES
from ringopt.tools.benchmarks.on_a_link import Mute, begin
from ringopt.tools.benchmarks.result import Row
from ringopt.tools.benchmarks.tensor_bytes import peak_bytes

HEADS = Heads(1, 8, 8, 64, 64, 4, 4, "float32", "flash_cpu")


class Alone(Mute):
    """One rank of a mesh whose others say what it says: for what it holds, the numbers do not matter."""

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        """As gloo does it, by way of a buffer of its own."""
        buffer = torch.stack([x] * self.size)
        return list(buffer.clone())

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

    @property
    def label(self) -> str:
        return f"{FEW} queries" if self.case.whole else self.case.pattern.partition("(0,")[0]


def on_a_rank(rank: int, ranks: int, length: int, done: Queue[str]) -> list[Row]:
    """`done` is told of each row, by one rank."""
    mesh, rows = begin(), list[Row]()
    for each in planned(ranks, length, HEADS, list(PATTERNS.items())):
        rows.append(row_of(mesh, each))
        if rank == 0:
            done.put(f"{ranks} ranks, {each.label}, {each.strategy}")
    return rows


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


def row_of(mesh: Mesh, each: Planned) -> Row:
    """On this rank."""
    predicted = memory_of(each.plan, each.case.heads, mesh.rank)
    forward, training = (held(mesh, each, way) for way in (False, True))
    return {
        "pattern": each.label, "strategy": each.strategy, "ranks": mesh.size,
        "forward": forward, "training": training,
        "forward predicted": predicted.forward, "training predicted": predicted.training,
    }  # fmt: skip


def held(mesh: Mesh, each: Planned, training: bool) -> int:
    """The most bytes of the operator, and in training of its backward, beside their operands."""
    case, plan, heads = each.case, each.plan, each.case.heads
    dtype = getattr(torch, heads.dtype)
    queries, keys = (count(layout.ranges(mesh.rank)) for layout in (plan.q_layout, plan.kv_layout))
    sizes = ((queries, heads.q_heads), (keys, heads.kv_heads), (keys, heads.kv_heads), (queries, heads.q_heads))
    # As projections leave them, heads beside one another in each row.
    rows = (torch.randn(heads.batch, *size, heads.key_dim, dtype=dtype) for size in sizes)
    q, k, v, dout = (x.transpose(1, 2) for x in rows)
    place: tuple[Any, ...] = (plan.q_layout.name, plan.kv_layout.name, each.strategy, "auto", mesh.name, VERSION)
    how = (case.pattern, "", [], 0.0, heads.key_dim**-0.5, *place)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.ringopt.ring_attention(q, k, v, [], None, None, case.q_length, case.kv_length, *how)[0]
        return out

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> object:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*leaves), leaves, dout)

    return peak_bytes(both if training else forward)
