"""A graph run node by node forward, and backward from random cotangents; values and gradients are told as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.compare.node_values import SteppedGraph
from ringopt.torch_compat.autograd import no_autocast

# A gradient that cancels to nothing (of the bias of keys) is all rounding: below this share of the largest element of
# all gradients, that is its measure.
LEAST = 1e-4


class Hooked(SteppedGraph):
    """Runs a graph; `seen(node, value)` is called with each value, `learned(node, gradient)` with each gradient."""

    def __init__(
        self,
        gm: fx.GraphModule,
        seen: Callable[[fx.Node, Any], None],
        learned: Callable[[fx.Node, Tensor], None],
    ):
        super().__init__(gm)
        self.seen, self.learned = seen, learned

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            if n.op != "placeholder":
                value = value.view_as(value)  # of its own, where the operator gave its operand
            value.register_hook(lambda gradient: self.learned(n, gradient))
        self.seen(n, value.detach() if isinstance(value, Tensor) else value)
        return value

    def forward(self, inputs: Sequence[Any]) -> Any:
        """What the graph returns."""
        outputs: Any = None
        for _node, value in self.values(inputs):
            outputs = value
        return outputs


def run_backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]) -> None:
    """The hooks of all that is between learn their gradients."""
    with no_autocast():
        torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)


def cotangent(size: Sequence[int], like: Tensor) -> Tensor:
    """Random, of length 1, the same on all ranks."""
    return random_like(size, like, seed=0).div_(max(prod(size), 1) ** 0.5)


def random_like(size: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Normal numbers of a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(size), generator=generator, dtype=torch.float64).to(like.device, like.dtype)
