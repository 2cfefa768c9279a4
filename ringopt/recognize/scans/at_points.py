"""Values of a part of a graph at points that are drawn: two analytic functions that agree at those are the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_aggregate

from ringopt.ir.constants import Constants

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def evaluated(
    nodes: Sequence[fx.Node],
    given: Mapping[fx.Node, Tensor],
    constants: Constants,
    arguments: Callable[[fx.Node], tuple[Any, Any]] = lambda node: (node.args, node.kwargs),
) -> list[Tensor] | None:
    """Of `nodes`, in float64 on the CPU, where some values are `given`; None where one cannot be computed. `arguments`
    of a node are those that it is computed with."""
    needed, stack = set[fx.Node](), list(nodes)
    while stack:
        each = stack.pop()
        if each not in needed and each not in given:
            needed.add(each)
            stack += [] if each in constants else each.all_input_nodes
    made: dict[fx.Node, Any] = dict(given)
    for each in nodes[0].graph.nodes:
        if each not in needed:
            continue
        if each in constants:
            found = constants.get(each)
            made[each] = found.double() if found is not None and found.is_floating_point() else found
        elif each.op == "call_function":
            args, kwargs = map_aggregate(fx.map_arg(arguments(each), made.__getitem__), wide)
            made[each] = each.target(*args, **kwargs)
        if made.get(each) is None:
            return None
    return [made[node] for node in nodes]


def wide(argument: Any) -> Any:
    """An argument as it is given where everything is in float64 on the CPU."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return torch.float64 if argument in NARROW else argument
