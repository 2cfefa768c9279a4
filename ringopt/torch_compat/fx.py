"""torch.fx behind its documented surface."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.fx as fx
from torch._decomp import get_decompositions
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["fresh_names", "get_decompositions", "has_buffer", "lazily_written", "make_fx", "rename_node"]

# get_decompositions(ops): a table for make_fx(decomposition_table=), of those that are in this release.
# make_fx(function, tracing_mode="real", pre_dispatch=, _allow_non_fake_inputs=True)(*inputs): the graph of ATen
#     operators that a call runs; with pre_dispatch as they stand above autograd and autocast.


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
