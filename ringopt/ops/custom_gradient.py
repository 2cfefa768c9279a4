"""`ringopt::custom_gradient`: the place of a CustomGradient (ir/autograd_function.py) while a graph is captured.

    custom_gradient(outputs, inputs, saved, number) -> outputs

A tracer records operators; `number` says which backward is to take this one's place.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("ringopt::custom_gradient", mutates_args=())
def custom_gradient(outputs: list[Tensor], inputs: list[Tensor], saved: list[Tensor], number: int) -> list[Tensor]:
    """`outputs`, in new memory."""
    return [y.clone(memory_format=torch.preserve_format) for y in outputs]


@custom_gradient.register_fake
def _(outputs: list[Tensor], inputs: list[Tensor], saved: list[Tensor], number: int) -> list[Tensor]:
    return [torch.empty_like(y, memory_format=torch.preserve_format) for y in outputs]
