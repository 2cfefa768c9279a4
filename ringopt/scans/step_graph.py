"""The graph of a step without what only costs calls: it has few numbers, and each call of an operator takes time.

transpose(bmm(a, b))   ->   bmm(transpose(b), transpose(a))            a result lies in the order that is asked for
reshape(x, x.shape)    ->   x                                          equal calls are made once
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ir.nodes import emit, outputs_of, shape_of
from ringopt.scans.trace import without_idle_views

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default)


def simplify(graph: fx.Graph) -> None:
    """Of a graph of ATen without writes, each node with its fake value."""
    without_idle_views(graph)
    once_each(graph)
    for node in list(graph.nodes):
        if transposes(node) and any(out is node for out in outputs_of(graph)):
            turn_product(graph, node)
    for node in list(graph.nodes):
        if transposes(node) and transposes(node.args[0]):
            node.replace_all_uses_with(node.args[0].args[0])
    once_each(graph)
    graph.eliminate_dead_code()


def once_each(graph: fx.Graph) -> None:
    """Equal calls are made once."""
    known = dict[str, fx.Node]()
    for node in list(graph.nodes):
        if node.op == "call_function":
            first = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def transposes(node: fx.Node) -> bool:
    """Whether it exchanges the last two dims."""
    if node.target is not aten.transpose.int:
        return False
    rank = len(shape_of(node))
    return sorted(dim % rank for dim in node.args[1:]) == [rank - 2, rank - 1]


def turn_product(graph: fx.Graph, node: fx.Node) -> None:
    """A transposed product is that of the transposed factors, the other way round."""
    product: fx.Node = node.args[0]
    while product.target is aten.reshape.default and len(product.users) == 1 and keeps_matrices(product):
        product = product.args[0]
    if product.target not in PRODUCTS or len(product.users) > 1:
        return
    with graph.inserting_before(node):
        first, second = (emit(graph, aten.transpose.int, (x, -2, -1), node) for x in reversed(product.args))
        turned = emit(graph, product.target, (first, second), node)
        node.replace_all_uses_with(emit(graph, aten.reshape.default, (turned, list(shape_of(node))), node))


def keeps_matrices(node: fx.Node) -> bool:
    """Whether a reshape leaves the last two dims as they are."""
    return shape_of(node)[-2:] == shape_of(node.args[0])[-2:]
