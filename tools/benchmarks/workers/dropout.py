"""Dropout under backend="ring" beside torch's own, and whether its gradient drops what its output drops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.tools.benchmarks.lab.numbers import distance, weights
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.timing import interleaved

P = 0.1  # what is dropped
OFF = 6.0  # standard deviations from P that no fair draw is off


def dropout(x: Tensor) -> Tensor:
    """What is timed."""
    return F.dropout(x, P)


def drops(rows: int, columns: int, dtype: str, inner: str, repeats: int) -> Row:
    """Forward and backward for x [rows, columns], medians of `repeats` calls."""
    torch.compiler.reset()
    x = torch.rand(rows, columns, dtype=getattr(torch, dtype)).add_(0.5).requires_grad_()
    ring = torch.compile(dropout, backend="ring", options={"inner_backend": inner})
    alone = dropout if inner == "eager" else torch.compile(dropout, backend=inner)
    gradient = weights(x)
    runs = {name: partial(step, run, x, gradient) for name, run in (("ring", ring), ("torch", alone))}
    found = {name: run() for name, run in runs.items()}
    seconds = interleaved(runs, repeats)
    return {
        "elements": x.numel(), "dtype": dtype, "inner": inner,
        **{f"{name}_seconds": taken for name, taken in seconds.items()},
        "ratio": seconds["ring"] / seconds["torch"], "error": wrong(*found["ring"], gradient),
    }  # fmt: skip


def step(run: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of x for that of the output."""
    output = run(x)
    (found,) = torch.autograd.grad(output, x, gradient)
    return output.detach(), found


def wrong(output: Tensor, found: Tensor, gradient: Tensor) -> float:
    """How far what was found for x is from what the output's own zeros leave of the gradient; infinite where they are
    too many or too few."""
    kept = output != 0
    off = (1 - kept.double().mean()) - P
    if abs(float(off)) > OFF * (P * (1 - P) / output.numel()) ** 0.5:
        return float("inf")
    return distance([found.double()], [kept * gradient.double() / (1 - P)])
