"""A program in float64 throughout: also where it asks for float32, as norms and softmaxes do, so that an error of 1e-12
is rounding and one of 1e-8 is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.overrides import TorchFunctionMode

import ringopt.backend
from ringopt.frontend.data_sizes.traced_again import on_ranks, traces_sizes
from ringopt.frontend.higher_order.associative_scan import keeps_associative_scans
from ringopt.frontend.loops.rolled import rolls_loops
from ringopt.torch_compat.pytree import tree_map


def widened_ring(**options: Any) -> Callable[..., Any]:
    """The backend "ring" of such programs."""

    @traces_sizes(on_ranks)
    @keeps_associative_scans
    @rolls_loops
    def ring(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        widen(gm)
        return ringopt.backend.ring(gm, inputs, options=options)

    return ring


def widen(gm: fx.GraphModule) -> None:
    """Dynamo's graph, in place."""
    for part in gm.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in part.graph.nodes:
            node.args, node.kwargs = (fx.node.map_aggregate(given, wide) for given in (node.args, node.kwargs))
            if node.op == "call_method" and node.target == "float":
                node.target = "double"
            if node.op == "call_function" and not node.all_input_nodes and _is_float32(node.meta.get("example_value")):
                node.update_kwarg("dtype", torch.float64)
            if (part is not gm or node.op != "placeholder") and "example_value" in node.meta:
                node.meta["example_value"] = tree_map(_widened, node.meta["example_value"])
        part.recompile()


class Widened(TorchFunctionMode):
    """What is called inside, without a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (fx.node.map_aggregate(given, wide) for given in (args, kwargs or {}))
        found = (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)
        return found.double() if _is_float32(found) and not found.requires_grad else found


def wide(argument: Any) -> Any:
    """An argument of a call."""
    return torch.float64 if argument is torch.float32 else argument


def _widened(value: Any) -> Any:
    return value.double() if _is_float32(value) else value


def _is_float32(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
