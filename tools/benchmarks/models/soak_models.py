"""Compiled models for `ringopt bench soak --compiled`: drawn alike on all ranks, each compiled once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.backend import inner
from ringopt.distributed.mesh import Mesh
from ringopt.drivers.compile import transform
from ringopt.options import Options
from ringopt.passes import sync_gradients
from ringopt.runtime.graph_boundary import examples
from ringopt.tools.benchmarks.lab.numbers import distance

MODELS = 8
STRATEGIES = ("ring", "gather", "ring2")
SHARDS = ("model", "attention")
DIM = 4
BUCKET = 4000  # bytes, so that there are several


@dataclass(frozen=True)
class Drawn:
    """What is drawn for one step of the soak; `heads`: of queries and of KV, `blocks`: layers of the model."""

    length: int
    heads: tuple[int, int]
    blocks: int
    causal: bool
    layout: str
    strategy: str
    shard: str
    seed: int

    @classmethod
    def of(cls, draw: random.Random, ranks: int) -> Drawn:
        kv_heads = draw.choice((1, 2, 3))
        heads = kv_heads * draw.choice((1, 2)), kv_heads
        how = (draw.random() < 0.7, draw.choice(("contiguous", "zigzag")), draw.choice(STRATEGIES), draw.choice(SHARDS))
        return cls(draw.randint(2 * ranks, 40), heads, draw.choice((1, 2, 3)), *how, draw.getrandbits(31))


class Block(nn.Module):
    """Queries are projected first, so that an order that is left alone hides nothing."""

    def __init__(self, drawn: Drawn, width: int):
        super().__init__()
        (heads, self.kv_heads), self.causal = drawn.heads, drawn.causal
        self.q, self.k, self.v = (nn.Linear(width, n * DIM, bias=False) for n in (heads, self.kv_heads, self.kv_heads))
        self.o, self.up, self.down = nn.Linear(heads * DIM, width), nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for of in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks of attention in a row, x [B, S, width]."""

    def __init__(self, drawn: Drawn, width: int):
        super().__init__()
        self.first = Block(drawn, width)
        self.others = nn.Sequential(*(Block(drawn, width) for _ in range(drawn.blocks - 1)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and what the first block gives."""
        first = self.first(x)
        return self.others(first).square().mean(), first * 2


class Training:
    """One model, compiled for a mesh, with what a step gives on one process: outputs and all gradients."""

    def __init__(self, drawn: Drawn, mesh: Mesh):
        self.drawn = drawn
        torch.manual_seed(drawn.seed)
        self.model = Model(drawn, 16).double()
        self.x = torch.randn(2, drawn.length, 16, dtype=torch.float64, requires_grad=True)
        how: Any = {"strategy": drawn.strategy, "layout": drawn.layout, "shard": drawn.shard}
        options = Options(inner_backend="aot_eager", **how)
        self._runs: list[Any] = []

        def backend(gm: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
            with patch.object(sync_gradients, "BUCKET", BUCKET):
                made = transform(gm, inputs, options, mesh)
            assert made.graph is not None, made.report
            run = inner(made.graph, examples(inputs, made.given), options, None, made.budget)
            self._runs.append(lambda: run(*inputs))
            return gm.forward

        torch.compiler.reset()
        self._expected = self._step(torch.compile(self.model, backend=backend, fullgraph=True, dynamic=False)(self.x))

    def _step(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        total = sum(output.square().sum() for output in outputs)
        assert isinstance(total, Tensor)
        found = torch.autograd.grad(total, [self.x, *self.model.parameters()])
        return [*(output.detach() for output in outputs), *found]

    def error(self, mesh: Mesh) -> float:
        """Of one step. `mesh` is that of which the graph knows the name."""
        return distance(self._step(self._runs[0]()), self._expected)


class Models:
    """Steps without end, the same on all ranks."""

    def __init__(self, seed: int, mesh: Mesh):
        self._draw = random.Random(seed)
        self._made = [Training(Drawn.of(self._draw, mesh.size), mesh) for _ in range(MODELS)]

    def next(self) -> Training:
        return self._draw.choice(self._made)

    def right(self, case: Training) -> None:
        """Met again in any case."""
