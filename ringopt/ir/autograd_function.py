"""Nodes that hold graphs: the gradient of a custom autograd.Function, and a call of a higher-order operator.

    y = F.apply(x)   ->   y, saved = forward of F, in line, on detach(x);  y = custom_gradient([y], [x], saved)

The forward is ordinary nodes, without a gradient. The node returns their results; the gradient of its inputs is what
the backward of F computes, whether or not it is the derivative (straight-through estimators, clipped gradients). That
backward is a flat graph of its own, sharded with the forward (ringopt/sharding/handlers/autograd_function.py).

    states = scan(step, [start], [tokens], [weight])   ->   states = scan([start, tokens, weight])

What the graphs of torch.cond, scan, while_loop or map do to rows is not known: such an operator runs on replicated
operands, on every rank alike, and what it gives is replicated. Its gradient is torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.torch_compat.autograd import never_compiled
from ringopt.torch_compat.pytree import tree_map_only
from ringopt.torch_compat.schema import HigherOrderOperator


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
    @never_compiled
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        saved, (outputs, _inputs) = ctx.saved_tensors, ctx.counts
        return (None, None, *[None] * outputs, *ctx.graph(*gradients, *saved), *[None] * len(saved))


class GradientArguments(NamedTuple):
    """Of a node that calls a CustomGradient."""

    outputs: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    saved: Sequence[fx.Node]

    @classmethod
    def of(cls, node: fx.Node) -> GradientArguments:
        return cls(*node.args)


def hands_gradient_on(like: Tensor) -> CustomGradient:
    """To its one input the gradient of its one output, which is `like` this."""
    graph = fx.Graph()
    gradient = graph.placeholder("gradient")
    gradient.meta["val"] = torch.empty_like(like)
    graph.output([gradient])
    return CustomGradient(fx.GraphModule({}, graph))


def custom_gradients(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that call a CustomGradient."""
    return [node for node in graph.nodes if isinstance(node.target, CustomGradient)]


@dataclass(frozen=True)
class OperandPlace:
    """Stands in the arguments for the tensor of this number, which is of this dtype when the program runs."""

    number: int
    dtype: torch.dtype


@dataclass(eq=False)
class HigherOrder:
    """`(tensors) -> tensors`.

    arguments  those of `operator`, positional ones and keywords, with an OperandPlace for each tensor
    random     whether its graphs draw random numbers
    strides    how each tensor lies in memory: views in its graphs may hold for that order of dims only
    autocast   the region that it stands in, as _enter_autocast is called; None: that which is open when it runs
    """

    operator: HigherOrderOperator
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    random: bool = False
    strides: Sequence[tuple[int, ...]] = ()
    autocast: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        self.__name__ = self.__qualname__ = str(self.operator.name())
        self.__module__ = __name__

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = tree_map_only(OperandPlace, lambda place: tensors[place.number], self.arguments)
        with nullcontext() if self.autocast is None else autocast_region(*self.autocast):
            found = self.operator(*args, **kwargs)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    def with_sizes(self, number: Callable[[Any], int]) -> HigherOrder:
        """The same call with a number for each open size among its arguments."""
        return replace(self, arguments=tree_map_only(torch.SymInt, number, self.arguments))

    def inside(self, autocast: tuple[Any, ...]) -> HigherOrder:
        """The same call in an autocast region."""
        return replace(self, autocast=autocast)


def autocast_region(device: str, dtype: torch.dtype, enabled: bool, _cache: bool | None) -> torch.autocast:
    """A region of autocast, from the arguments of _enter_autocast."""
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def calls_of_graphs(graph: fx.Graph) -> list[fx.Node]:
    """The higher-order calls of a graph."""
    return [node for node in graph.nodes if isinstance(node.target, HigherOrder)]


def operands_of(call: fx.Node) -> Sequence[fx.Node]:
    """The tensors that a higher-order call is given."""
    tensors: Sequence[fx.Node] = call.args[0]
    return tensors
