"""The graph of a step without what only costs calls: it has few numbers, and each call of an operator takes time.

transpose(bmm(a, b))   ->   bmm(transpose(b), transpose(a))            a result lies in the order that is asked for
reshape(x, x.shape)    ->   x                                          equal calls are made once
x - bmm(a, b)          ->   baddbmm(x, a, b, alpha=-1)                 a product is added where the sum is
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ir.nodes import emit, outputs_of, shape_of, value_of
from ringopt.scans.trace import without_idle_views

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.bmm.default)
SUMS = {aten.mm.default: aten.addmm.default, aten.bmm.default: aten.baddbmm.default}
WIDE = (torch.float32, torch.float64)  # narrower ones are rounded before they are added


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


def add_products(graph: fx.Graph) -> None:
    """Sums and differences with a product that nothing else reads are products that are added to something."""
    for node in list(graph.nodes):
        if node.target not in (aten.add.Tensor, aten.sub.Tensor) or node.kwargs:
            continue
        for place in (1, 0):
            product, other = product_of(node.args[place]), node.args[1 - place]
            if product is not None and alike(other, node) and alike(node.args[place], node):
                signs = {"beta": 1, "alpha": 1}
                if node.target is aten.sub.Tensor:
                    signs["alpha" if place else "beta"] = -1
                node.replace_all_uses_with(added(graph, node, other, product, signs))
                break
    graph.eliminate_dead_code()


def product_of(node: object) -> fx.Node | None:
    """The product that `node` is, in another shape or not, read here alone."""
    while isinstance(node, fx.Node) and node.target is aten.reshape.default and len(node.users) == 1:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target in SUMS and len(node.users) == 1 else None


def alike(x: object, node: fx.Node) -> bool:
    """Whether `x` is a tensor of the shape and dtype of `node`, in which sums need not be rounded first."""
    value = value_of(node)
    return isinstance(x, fx.Node) and shape_of(x) == shape_of(node) and value_of(x).dtype == value.dtype in WIDE


def added(graph: fx.Graph, node: fx.Node, other: fx.Node, product: fx.Node, signs: dict[str, int]) -> fx.Node:
    """`product`, added to `other`, in the shape of `node`."""

    def shaped(x: fx.Node, like: fx.Node) -> fx.Node:
        shape = list(shape_of(like))
        return x if list(shape_of(x)) == shape else emit(graph, aten.reshape.default, (x, shape), node)

    with graph.inserting_before(node):
        addend = shaped(other, product)
        return shaped(emit(graph, SUMS[product.target], (addend, *product.args), node, signs), node)
