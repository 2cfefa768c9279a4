"""The values of those nodes of a graph that no input reaches."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_aggregate

from ringopt.ir.nodes import op_name, value_of
from ringopt.ir.symbolic_sizes import is_open, longest
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily
from ringopt.torch_compat.schema import OpOverload, schema_of

# Values of more elements are not computed while a program is compiled: ids of a million tokens are, large tables not.
LARGEST = 1 << 24


class Constants:
    """Computes on demand, by the ops of the graph itself, but on the CPU: the program's device may be meta, or busy.

    `given` holds the tensors that are part of the program (its constants, buffers), by node; those that are read are
    added to `relied_on`, for a buffer may hold something else at a later call. Parameters and inputs do not belong
    there.
    """

    def __init__(self, graph: fx.Graph, given: Mapping[fx.Node, Tensor], relied_on: set[fx.Node] | None = None):
        self.given = given
        self.relied_on = set[fx.Node]() if relied_on is None else relied_on
        self.values: dict[fx.Node, Any] = {node: value.cpu() for node, value in given.items()}
        self.free: dict[fx.Node, None] = {}  # in the order of the graph
        for node in graph.nodes:
            if node in self.values or (is_pure(node) and all(arg in self.free for arg in node.all_input_nodes)):
                self.free[node] = None

    def __contains__(self, node: fx.Node) -> bool:
        """Whether no input reaches `node`; its value may still be too large to compute."""
        return node in self.free

    def get(self, node: fx.Node) -> Tensor | None:
        """The value; None where it depends on an input or on a symbolic size, or it or a value before it is too
        large."""
        if node not in self.free:
            return None
        needed, stack = set[fx.Node](), [node]
        while stack:
            each = stack.pop()
            if each not in needed and each not in self.values:
                needed.add(each)
                stack.extend(each.all_input_nodes)
        self.relied_on |= self.below(node)
        if needed:
            for each in self.free:
                if each in needed:
                    self.values[each] = self._compute(each)
        value = self.values[node]
        return value if isinstance(value, Tensor) else None

    def below(self, node: fx.Node) -> set[fx.Node]:
        """The given tensors that `node` depends on."""
        found, seen, stack = set[fx.Node](), {node}, [node]
        while stack:
            each = stack.pop()
            if each in self.given:
                found.add(each)
                continue
            for above in each.all_input_nodes:
                if above not in seen:
                    seen.add(above)
                    stack.append(above)
        return found

    def _compute(self, node: fx.Node) -> Any:
        if any(self.values[arg] is None for arg in node.all_input_nodes) or _elements(value_of(node)) > LARGEST:
            return None
        if _has_open(node.args) or _has_open(node.kwargs):
            return None
        args, kwargs = map_aggregate(fx.map_arg((node.args, node.kwargs), self.values.__getitem__), _on_cpu)
        with unset_fake_temporarily(), torch.no_grad():
            return node.target(*args, **kwargs)


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _elements(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_elements, value))
    return longest(value.numel()) if isinstance(value, Tensor) else 0


def _has_open(arguments: Any) -> bool:
    found: list[Any] = []
    map_aggregate(arguments, lambda arg: found.append(arg) if is_open(arg) else None)
    return bool(found)


def is_pure(node: fx.Node) -> bool:
    """Whether a call is deterministic, without side effects, and fills its result."""
    target = node.target
    if node.op != "call_function":
        return False
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    undefined = "empty" in op_name(node)
    return not (undefined or schema_of(target).is_mutable or torch.Tag.nondeterministic_seeded in target.tags)
