"""The numbers of one call, outputs and gradients, and how far two calls are apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# In float32, relative to the largest entry; rounding alone stays far below.
WRONG = 1e-4


def numbers(run: Callable[..., Any], args: Sequence[Any], differentiated: Iterable[Tensor] = ()) -> list[Tensor]:
    """The tensors that `run(*args)` returns and the gradients of `differentiated`, for unequal weights of the outputs:
    zeros for what takes no part. Without any to differentiate, the call is made under no_grad."""
    wanted = list(differentiated)
    with torch.set_grad_enabled(bool(wanted)):
        found = run(*args)
    outputs = [found] if isinstance(found, Tensor) else list(found)
    seeds = [weights(out) for out in outputs]
    gradients = torch.autograd.grad(outputs, wanted, seeds, materialize_grads=True) if wanted else ()
    return [out.detach() for out in outputs] + list(gradients)


def weights(output: Tensor) -> Tensor:
    """Weights of a sum over an output, none like another, so that no two elements of it can be exchanged unnoticed."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view(output.shape)


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest entry of its tensor; infinite where one is not a number."""
    pairs = zip(found, expected, strict=True)
    parts = [((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).nan_to_num(nan=torch.inf).item() for a, b in pairs]
    return float(max(parts))
