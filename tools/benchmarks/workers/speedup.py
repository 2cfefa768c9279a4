"""One rank's part of `ringopt bench speedup`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.tools.benchmarks.lab.numbers import distance, numbers, weights
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.workers.overlap_rank import begin_rank, nothing, together

HEADS, DIM, LAYOUT = 8, 64, "zigzag"


def on_a_rank(rank: int, ranks: int, length: int, repeats: int) -> list[Row]:
    """Causal attention of [1, HEADS, length, DIM], forward, and with its backward: seconds on all ranks, seconds on
    this one alone while the others wait, the error of this rank's rows."""
    begin_rank()
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, HEADS, length, DIM, generator=draw).requires_grad_() for _ in range(3)]
    local = [rows(x.detach()).requires_grad_() for x in whole]

    def spread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ringopt.attention(q, k, v, is_causal=True, layout=LAYOUT)

    def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    expected = numbers(alone, whole, whole)
    seed = rows(weights(expected[0]))
    out = spread(*local)
    found = [out.detach(), *torch.autograd.grad(out, local, seed)]
    error = distance(found, [rows(x) for x in expected])
    made = []
    for training in (False, True):
        runs = {"spread": called(spread, local, training), "alone": called(alone, whole, training)}
        if rank:
            runs["alone"] = nothing
        times = together(runs, repeats)
        made.append({"training": training, "error": error, **{who: time.seconds for who, time in times.items()}})
    return made


def rows(x: Tensor) -> Tensor:
    """Of this rank."""
    return ringopt.shard(x, 2, layout=LAYOUT).clone()


def called(run: Callable[..., Tensor], operands: list[Tensor], training: bool) -> Callable[[], object]:
    """A call of the forward, and in training of the backward."""

    def call() -> None:
        with torch.set_grad_enabled(training):
            out = run(*operands)
        if training:
            torch.autograd.grad(out, operands, out.detach())

    return call
