"""The gradient of a custom autograd.Function, as a node of the graph.

    y = F.apply(x)   ->   y, saved = forward of F, in line, on detach(x);  y = custom_gradient([y], [x], saved)

The forward is ordinary nodes, without a gradient. The node returns their results; the gradient of its inputs is what
the backward of F computes, whether or not it is the derivative (straight-through estimators, clipped gradients). That
backward is a flat graph of its own, sharded with the forward (ringopt/sharding/handlers/autograd_function.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor


class CustomGradient:
    """`(outputs, inputs, saved) -> outputs`. `backward(*gradients of the outputs, *saved)` returns the gradients of the
    inputs, a list."""

    def __init__(self, backward: fx.GraphModule):
        self.backward = backward
        self.__name__ = self.__qualname__ = "custom_gradient"
        self.__module__ = __name__

    def __call__(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], saved: Sequence[Tensor]) -> list[Tensor]:
        found: Any = _Apply.apply(self.backward, (len(outputs), len(inputs)), *outputs, *inputs, *saved)  # type: ignore[no-untyped-call]
        return list(found)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backward: fx.GraphModule, counts: tuple[int, int], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.graph, ctx.counts = backward, counts
        ctx.save_for_backward(*values[sum(counts) :])
        return tuple(y.view_as(y) for y in values[: counts[0]])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved, (outputs, _inputs) = ctx.saved_tensors, ctx.counts
        return (None, None, *[None] * outputs, *ctx.graph(*gradients, *saved), *[None] * len(saved))


def custom_gradients(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that call a CustomGradient."""
    return [node for node in graph.nodes if isinstance(node.target, CustomGradient)]
