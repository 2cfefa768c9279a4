"""`ringopt::snapshot`: what an input holds before the program writes to it.

A backward that reads a written input finds the new value. Torch's min-cut partitioner does that (torch 2.13): it saves
the input and computes from it again what came before the write, so that the gradient behind a counter that is added to
twice is wrong. Of an operator that it does not know it saves the result.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ringopt::snapshot", mutates_args=(), schema="(Tensor x) -> Tensor")
def snapshot(x: Tensor) -> Tensor:
    """A copy of `x`, in its order of dims. Without a gradient."""
    return torch.clone(x)


@snapshot.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)
