"""Models and batches that are the same in every run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor


def seeded(make: Callable[..., Any], *given: Any, **sizes: Any) -> Any:
    """A model in float64, in eval mode, with the same weights each time. What begins as zero is drawn at random, else
    nothing would be seen of a gate or a block behind it."""
    torch.manual_seed(0)
    model = make(*given, **sizes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0.0, 0.1)
    return model


def first_of(make: Callable[[Any], nn.Module], given: Callable[[nn.Module, Any], Any], forms: Iterable[Any]) -> Any:
    """`make(form)` and `given(model, form)` of the first form for which that works, thinned where that does. Raises
    ValueError where none does."""
    failed: list[str] = []
    for form, thin in itertools.product(forms, (True, False)):
        try:
            model = make(form)
            return model, given(thinned(model) if thin else model, form)
        except Exception as error:  # of whatever kind: the next form may be right
            failed.append(f"{type(error).__name__}: {error}")
    raise ValueError("; or ".join(dict.fromkeys(failed)))


def images(side: int, frames: int = 0) -> Tensor:
    """Two images, or videos of so many frames, of random numbers."""
    return normal(2, 3, frames, side, side) if frames else normal(2, 3, side, side)


def normal(*shape: int) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def thinned(model: nn.Module) -> nn.Module:
    """Of blocks in a row, of one class and with parameters of the same shapes, the first two alone."""
    rows = [module for module in model.modules() if isinstance(module, (nn.Sequential, nn.ModuleList))]
    for row in rows:
        alike = [(type(block), [p.shape for p in block.parameters()]) for block in row]
        for place in reversed(range(2, len(alike))):
            if alike[place] == alike[place - 1] == alike[place - 2] and alike[place][1]:
                del row[place]
    return model
