"""Row-major strides, forced where Inductor would compare symbolic strides.

    dy = add(dq, dk)               dy  = add(dq, dk)                                   # [B, 1, n, D]
    dw = mm(view(dy).t(), x)  ->   row = inductor_force_stride_order(dy, [4, 3, 2, 1])
                                   dw  = mm(view(row).t(), x)

A value of one channel is row-major and channels last at once. Where a product reads a view of it, Inductor takes it for
the latter and compares its strides as numbers (torch 2.11 to 2.13), which fails for an unbacked number of tokens: the
gradient of one head behind a linear layer, say.

A value that the forward keeps for the backward may have the strides that Inductor likes. The backward is told of them,
but for those with an unbacked number of tokens: it expects these row-major, as the graph says.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.products import is_product
from ringopt.ir.nodes import is_aten, value_of
from ringopt.torch_compat.inductor_passes import FORCE_STRIDE_ORDER
from ringopt.torch_compat.schema import OpOverload, schema_of
from ringopt.torch_compat.symbolic_shapes import free_unbacked_symbols
from ringopt.torch_compat.tensors import is_contiguous_for_memory_format_or_false

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def say_row_major(graph: fx.Graph) -> None:
    """Forces row-major strides, in place, on values whose layout Inductor may choose."""
    for node in list(graph.nodes):
        views = [user for user in node.users if _is_view(user) and leads_to_kernel(user)]
        if not views or _is_view(node) or is_product(node) or not is_aten(node) or not _is_ambiguous(value_of(node)):
            continue
        row = row_major(graph, node)
        for view in views:
            view.replace_input_with(node, row)
    for node in graph.output_node().all_input_nodes:
        if is_aten(node) and not _is_view(node) and not is_product(node) and _is_row_major(value_of(node)):
            readers = list(node.users)
            row = row_major(graph, node)
            for reader in readers:
                reader.replace_input_with(node, row)


def row_major(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`node` with such strides, behind it. Their order counts, and on fake tensors the numbers do: an operator that
    reads it would be given what has these."""
    with graph.inserting_before(node.next):
        strides: list[Any] = [1]
        for dim in reversed(range(1, value_of(node).dim())):
            strides.insert(0, times(graph, strides[0], size_of(graph, node, dim)))
        row = graph.call_function(FORCE_STRIDE_ORDER, (node, strides))
    row.meta = dict(node.meta)
    return row


def size_of(graph: fx.Graph, node: fx.Node, dim: int) -> Any:
    """A number, or a node that has it."""
    size = value_of(node).shape[dim]
    if isinstance(size, int):
        return size
    made = graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
    made.meta["val"] = size
    return made


def times(graph: fx.Graph, a: Any, b: Any) -> Any:
    """Of two such."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    made = graph.call_function(operator.mul, (a, b))
    made.meta["val"] = known(a) * known(b)
    return made


def known(a: Any) -> Any:
    """What it is while a graph is made."""
    return a.meta["val"] if isinstance(a, fx.Node) else a


def _is_row_major(value: object) -> bool:
    """Of an unbacked size, and in the order that the graph says."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or not free_unbacked_symbols(value):
        return False
    return is_contiguous_for_memory_format_or_false(value, memory_format=torch.contiguous_format)


def _is_ambiguous(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.dim() not in CHANNELS_LAST or not free_unbacked_symbols(value):
        return False
    return is_contiguous_for_memory_format_or_false(value, memory_format=CHANNELS_LAST[value.dim()])


def _is_view(node: fx.Node) -> bool:
    return is_aten(node) and any(result.alias_info is not None for result in schema_of(node.target).returns)


def leads_to_kernel(view: fx.Node) -> bool:
    """Whether an extern kernel reads `view`: a matrix product, or an operator of ringopt."""
    ours = (user for user in view.users if isinstance(user.target, OpOverload))
    return any(
        is_product(user) or user.target.namespace == "ringopt" or (_is_view(user) and leads_to_kernel(user))
        for user in ours
    )
