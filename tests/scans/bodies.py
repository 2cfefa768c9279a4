"""Bodies of scans that tests write as functions, and what they compute step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringopt.scans.body import to_text
from ringopt.torch_compat.fx import make_fx


@dataclass(frozen=True)
class Scan:
    """`step(*carries, *rows, *consts)` returns the new carries and the ys."""

    step: Callable[..., Sequence[Tensor]]
    init: list[Tensor]
    xs: list[Tensor]
    consts: list[Tensor]

    @property
    def text(self) -> str:
        operands = [*self.init, *(x[0] for x in self.xs), *self.consts]
        traced = make_fx(lambda *given: tuple(self.step(*given)), tracing_mode="real", pre_dispatch=True)
        graph = traced(*(x.detach() for x in operands))
        return to_text(graph, len(self.init), len(self.xs), len(self.consts))

    @property
    def operands(self) -> list[Tensor]:
        return [*self.init, *self.xs, *self.consts]

    def loop(self) -> list[Tensor]:
        """As a Python loop."""
        state, rows = list(self.init), []
        for row in zip(*(x.unbind(0) for x in self.xs), strict=True):
            found = self.step(*state, *row, *self.consts)
            state = list(found[: len(state)])
            rows.append(found[len(state) :])
        return [*state, *(torch.stack(ys) for ys in zip(*rows, strict=True))]

    def operator(self) -> list[Tensor]:
        return list(torch.ops.ringopt.scan(self.init, self.xs, self.consts, self.text))


def drawn(*sizes: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((sizes, seed)) % 2**31)
    return (torch.randn(sizes, generator=generator, dtype=torch.float64) * scale).requires_grad_()


def gates(*sizes: int, seed: int = 0) -> Tensor:
    """Near 1: a state is not forgotten within a few steps, or a test would see nothing of the ranks before."""
    return (0.9 + 0.1 * torch.sigmoid(drawn(*sizes, seed=seed))).detach().requires_grad_()


def delta_rule(steps: int, b: int = 2, h: int = 2, c: int = 3, dk: int = 4, dv: int = 5) -> Scan:
    """A gated delta rule over chunks of `c` tokens: point in h, mixed in dk, free in dv."""

    def step(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        new = v - k @ s
        return s * g[..., None, None] + k.transpose(-1, -2) @ new, q @ s + (q @ k.transpose(-1, -2)).tril() @ new

    q, k = (drawn(steps, b, h, c, dk, scale=0.3, seed=i) for i in range(2))
    v = drawn(steps, b, h, c, dv, seed=2)
    return Scan(step, [drawn(b, h, dk, dv, seed=3)], [q, k, v, gates(steps, b, h)], [])


def diagonal(steps: int, b: int = 2, d: int = 3) -> Scan:
    """A gated linear recurrence, with a weight that all steps share."""

    def step(s: Tensor, a: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        s = a * s + x
        return s, s * w

    return Scan(step, [drawn(b, d)], [gates(steps, b, d), drawn(steps, b, d, seed=1)], [drawn(d)])


def stabilised(steps: int, b: int = 2, d: int = 3) -> Scan:
    """RWKV-4: a running maximum, then a sum and a count that are scaled by it."""

    def step(m: Tensor, num: Tensor, den: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Any:
        top = torch.maximum(m, u + k)
        out = torch.exp(m - top) * num + torch.exp(u + k - top) * v
        out = out / (torch.exp(m - top) * den + torch.exp(u + k - top))
        new = torch.maximum(m - w, k)
        decay, gain = torch.exp(m - w - new), torch.exp(k - new)
        return new, decay * num + gain * v, decay * den + gain, out

    zero = torch.zeros(b, d, dtype=torch.float64)
    init = [(zero - 38).requires_grad_(), zero.clone().requires_grad_(), zero.clone().requires_grad_()]
    decay = (gates(d).detach() * 0.02).requires_grad_()
    return Scan(step, init, [drawn(steps, b, d), drawn(steps, b, d, seed=1)], [decay, drawn(d)])
