"""torch.fx behind its documented surface."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
import torch.fx as fx
from torch._decomp import get_decompositions
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.proxy_tensor import make_fx as torch_make_fx
from torch.overrides import TorchFunctionMode

__all__ = ["fresh_names", "get_decompositions", "has_buffer", "lazily_written", "make_fx", "rename_node"]

# get_decompositions(ops): a table for make_fx(decomposition_table=), of those that are in this release.

aten = torch.ops.aten


def make_fx(
    function: Callable[..., Any], *, pre_dispatch: bool = False, **options: Any
) -> Callable[..., fx.GraphModule]:
    """`make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)`: the graph of ATen operators that
    a call runs; with pre_dispatch as they stand above autograd and autocast. Without it torch 2.14 and later write
    `detach` as `alias`, which has a gradient: here it stays what it is."""
    if not pre_dispatch and torch.__version__ >= "2.14":
        function = _detaching(function)
    traced: Callable[..., fx.GraphModule] = torch_make_fx(function, pre_dispatch=pre_dispatch, **options)
    return traced


def _detaching(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any) -> Any:
        with _DetachIsWritten():
            return function(*args)

    return call


_OF_DATA = vars(torch._C.TensorBase)["data"].__get__
_DETACHES = (torch.Tensor.detach, torch.detach, aten.detach, aten.detach.default, _OF_DATA)


class _DetachIsWritten(TorchFunctionMode):
    """Has the last node of the graph that is traced be `detach` where it is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _DETACHES and (mode := get_proxy_mode()) is not None:
            last = next(iter(reversed(mode.tracer.graph.nodes)))
            if last.target is aten.alias.default:
                last.target = aten.detach.default
        return made


def lazily_written() -> AbstractContextManager[Any]:
    """Within it the Python code of a GraphModule is written when it is run or read, not at every recompile."""
    context: AbstractContextManager[Any] = _use_lazy_graph_module(True)
    return context


def rename_node(node: fx.Node, name: str) -> None:
    """`_rename`: the name, or the next that is free in the graph."""
    node._rename(name)


def fresh_names(graph: fx.Graph) -> Any:
    """Forgets which names are taken in the graph; what `create_name(candidate, node)` of the result gives is taken
    from then on."""
    names = graph._graph_namespace = fx.Graph()._graph_namespace
    return names


def has_buffer(module: fx.GraphModule, name: str) -> bool:
    """Whether the module has a buffer of its own of this name."""
    return name in module._buffers
