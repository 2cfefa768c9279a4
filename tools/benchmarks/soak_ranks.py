"""One rank of `ringopt bench soak`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

import ringopt
from ringopt.attention.plans import NAMES
from ringopt.distributed.mesh import Mesh, Transfer
from ringopt.distributed.process import process_mesh
from ringopt.errors import OptionError
from ringopt.tools.benchmarks.numbers import distance
from ringopt.tools.benchmarks.result import Row
from ringopt.tools.benchmarks.soak import TIMEOUT
from ringopt.tools.benchmarks.wrapped import Wrapped

WRONG = 1e-9
LONGEST = 90  # rows
T = TypeVar("T")


class Delayed(Wrapped):
    """`mesh`, late by up to `delay` seconds wherever it talks."""

    def __init__(self, mesh: Mesh, delay: float, seed: int):
        super().__init__(mesh)
        self.delay = delay
        self._random = random.Random(seed)

    def _late(self, talk: Callable[[], T]) -> T:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self.delay)
        return talk()

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        return self._late(lambda: self.mesh._post(sends, receives, label))

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        return self._late(lambda: self.mesh._all_gather(x, label))

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return self._late(lambda: self.mesh._all_reduce(x, label))


@dataclass(frozen=True)
class Drawn:
    q_length: int
    kv_length: int
    heads: tuple[int, int]
    causal: bool
    window: int | None
    layout: str
    strategy: str
    seed: int

    @classmethod
    def of(cls, draw: random.Random, ranks: int) -> Drawn:
        length = draw.randint(2 * ranks, LONGEST)
        other = draw.randint(2 * ranks, LONGEST) if draw.random() < 0.2 else length
        kv_heads = draw.choice((1, 2, 3, 4))
        window = draw.randint(1, LONGEST) if draw.random() < 0.4 else None
        groups, causal = draw.choice((1, 2, 3)), draw.random() < 0.6
        layout, strategy = draw.choice(("contiguous", "zigzag")), draw.choice(NAMES)
        how = (causal, window, layout, strategy, draw.getrandbits(31))
        return cls(length, other, (kv_heads * groups, kv_heads), *how)

    def operands(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, whole."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = zip((*self.heads, self.heads[1], self.heads[0]), (0, 1, 1, 0), strict=True)
        lengths = (self.q_length, self.kv_length)
        return [
            torch.randn(1, heads, lengths[side], 8, dtype=torch.float64, generator=generator) for heads, side in sizes
        ]


def soaked(rank: int, ranks: int, steps: int, seconds: float, delay: float, seed: int) -> list[Row]:
    """A row for each strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Delayed(process_mesh(None, TIMEOUT), delay, seed + rank)
    rows = {name: Row(strategy=name, steps=0, refused=0, wrong=0, error=0.0, longest=0.0) for name in NAMES}
    draw, begin, done = random.Random(seed), time.monotonic(), 0
    while done < steps and not over(mesh, time.monotonic() - begin > seconds):
        case = Drawn.of(draw, ranks)
        row, start = rows[case.strategy], time.monotonic()
        try:
            found = on_ranks(case, mesh)
        except OptionError:  # of the plan, which all ranks have alike: before the first message
            row["refused"] += 1
            continue
        far = distance(found, [ringopt.shard(x, 2, mesh=mesh.mesh, layout=case.layout) for x in on_one(case)])
        row["steps"] += 1
        row["wrong"] += far > WRONG
        row["error"] = max(row["error"], far)
        row["longest"] = max(row["longest"], time.monotonic() - start)
        done += 1
    return list(rows.values())


def over(mesh: Mesh, mine: bool) -> bool:
    """Whether time is up for any rank."""
    return float(mesh.all_reduce(torch.tensor(float(mine)), "over")) > 0


def on_ranks(case: Drawn, mesh: Delayed) -> list[Tensor]:
    """Of this rank's rows: the output, and the gradients of q, k and v."""
    q, k, v, dout = (ringopt.shard(x, 2, mesh=mesh.mesh, layout=case.layout) for x in case.operands())
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ringopt.attention(
        *(q, k, v),
        is_causal=case.causal,
        enable_gqa=True,
        window=case.window,
        mesh=mesh,
        layout=case.layout,
        strategy=case.strategy,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_one(case: Drawn) -> list[Tensor]:
    """The same of all rows, written out."""
    q, k, v, dout = case.operands()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    away = torch.arange(case.kv_length) - torch.arange(case.q_length)[:, None]
    seen = away <= 0 if case.causal else torch.ones_like(away, dtype=torch.bool)
    if case.window is not None:
        seen = seen & (away > -case.window) & (away < case.window)
    keys, values = (x.repeat_interleave(case.heads[0] // case.heads[1], 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * 8**-0.5).masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    out = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
