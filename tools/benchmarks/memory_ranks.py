"""One rank's part of `ringopt bench memory`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.attention.choose import Case
from ringopt.attention.layouts import layout_of
from ringopt.attention.memory import memory_of
from ringopt.attention.predict import Heads
from ringopt.attention.rows import count
from ringopt.distributed.mesh import Mesh
from ringopt.errors import OptionError
from ringopt.ops.ring import VERSION
from ringopt.tools.benchmarks.memory import PATTERNS, STRATEGIES
from ringopt.tools.benchmarks.on_a_link import Mute, begin
from ringopt.tools.benchmarks.result import Row
from ringopt.tools.benchmarks.tensor_bytes import peak_bytes

HEADS, DIM = 8, 64


class Alone(Mute):
    """One rank of a mesh whose others say what it says: for what it holds, the numbers do not matter."""

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        return [x.clone() for _ in range(self.size)]

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return x.clone()


def on_a_rank(rank: int, ranks: int, length: int) -> list[Row]:
    mesh, heads = begin(), Heads(1, HEADS, HEADS, DIM, DIM, 4, 4, "float32", "flash_cpu")
    return list(rows_of(mesh, length, heads, list(PATTERNS.items())))


def rows_of(mesh: Mesh, length: int, heads: Heads, patterns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Of every strategy that can do the pattern in the layout, on this rank."""
    for pattern, layout in patterns:
        case = Case(pattern, length, length, heads, True)
        for strategy in STRATEGIES:
            try:
                plan = case.plan(mesh.size, layout, strategy)
            except OptionError:
                continue  # it is none for this pattern
            predicted = memory_of(plan, heads, mesh.rank)
            forward, training = (held(mesh, case, layout, strategy, way) for way in (False, True))
            yield {
                "pattern": pattern, "strategy": strategy, "ranks": mesh.size, "forward": forward, "training": training,
                "forward predicted": predicted.forward, "training predicted": predicted.training,
            }  # fmt: skip


def held(mesh: Mesh, case: Case, layout: str, strategy: str, training: bool) -> int:
    """The most bytes of the operator, and in training of its backward, beside their operands."""
    heads, rows = case.heads, count(layout_of(layout, case.q_length, mesh.size).ranges(mesh.rank))
    dtype = getattr(torch, heads.dtype)
    q, dout = (torch.randn(heads.batch, heads.q_heads, rows, heads.key_dim, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(heads.batch, heads.kv_heads, rows, heads.key_dim, dtype=dtype) for _ in range(2))
    place: tuple[Any, ...] = (layout, layout, strategy, "auto", mesh.name, VERSION)
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

    run: Callable[[], object] = both if training else forward
    run()  # handshakes are done, and plans made
    return peak_bytes(run)
