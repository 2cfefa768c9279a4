"""The values of those nodes of a graph that no input reaches."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate

from ringopt.graph.nodes import value_of

# More elements than this are not computed while a program is compiled.
LARGEST = 1 << 22


class Constants:
    """Computes on demand, by the ops of the graph itself, but on the CPU: the program's device may be meta, or busy.

    `given` holds the tensors that are part of the program (constants it was written with), by node. Parameters, buffers
    and inputs do not belong there: they may hold something else at the next call.
    """

    def __init__(self, graph: fx.Graph, given: Mapping[fx.Node, Tensor]):
        self.values: dict[fx.Node, Tensor | None] = {node: value.cpu() for node, value in given.items()}
        self.free: set[fx.Node] = set()
        for node in graph.nodes:
            if node in self.values or (is_pure(node) and all(arg in self.free for arg in node.all_input_nodes)):
                self.free.add(node)

    def __contains__(self, node: fx.Node) -> bool:
        """Whether no input reaches `node`; its value may still be too large to compute."""
        return node in self.free

    def get(self, node: fx.Node) -> Tensor | None:
        if node not in self.free:
            return None
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Tensor | None:
        if any(isinstance(value_of(arg), Tensor) and self.get(arg) is None for arg in node.all_input_nodes):
            return None
        value = value_of(node)
        if not isinstance(value, Tensor) or value.numel() > LARGEST:
            return None
        args, kwargs = map_aggregate(fx.map_arg((node.args, node.kwargs), self.get), on_cpu)
        with unset_fake_temporarily(), torch.no_grad():
            result: Tensor = node.target(*args, **kwargs)
        return result


def on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def is_pure(node: fx.Node) -> bool:
    """A call whose result follows from its arguments."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags
