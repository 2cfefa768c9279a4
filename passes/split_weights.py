"""Attention whose weights are a sum or a difference of softmaxes becomes as many attentions (Ye et al., Differential
Transformer, 2024, section 2.1).

    (softmax(a) - c * softmax(b)) @ v                    ->  softmax(a) @ v - c * (softmax(b) @ v)
    w = softmax(a).view(B, H, 2, S, S)
    (w[:, :, 0] - c * w[:, :, 1]) @ v                    ->  (y := w @ v[:, :, None])[:, :, 0] - c * y[:, :, 1]

A product is linear in its weights: same numbers but for rounding. After: no matmul reads a sum of two softmaxes, but
where the weights are used elsewhere too, or where a part has another dtype than the sum.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.graph.nodes import emit, is_tensor, op_name, shape_of, value_of
from ringopt.graph.spelled import SOFTMAX
from ringopt.pipeline import Context, Pass

aten = torch.ops.aten

SUMS = ("add", "sub")
VIEWS = ("view", "reshape", "unflatten", "to", "_to_copy")  # between a softmax and the part of it that is read


class SplitWeights(Pass):
    name = "split_weights"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node in list(gm.graph.nodes):
            # A factor of each query stands beside rows of the product, which a vector of values has none of.
            if op_name(node) == "matmul" and is_sum(node.args[0]) and len(shape_of(node.args[1])) > 1:
                with gm.graph.inserting_before(node):
                    node.replace_all_uses_with(Splitter(gm.graph, node).times(node.args[0]))


def is_sum(weights: fx.Node) -> bool:
    """Of two tensors of its shape, each made of a softmax, for one product alone."""
    if op_name(weights) not in SUMS or len(weights.users) != 1 or not all(map(is_tensor, weights.args[:2])):
        return False
    return all(
        shape_of(part) == shape_of(weights) and alike(part, weights) and is_weights(part) for part in weights.args[:2]
    )


def alike(part: fx.Node, whole: fx.Node) -> bool:
    """Whether both have the dtype that the values are multiplied in."""
    return bool(value_of(part).dtype == value_of(whole).dtype)


def is_weights(node: fx.Node) -> bool:
    """A softmax, a view or a part of one, or a multiple of that."""
    if op_name(node) in SUMS:
        return is_sum(node)
    if op_name(node) == "mul":
        return any(is_multiple(one, other, node) for one, other in both(node))
    if op_name(node) == "select":
        node = node.args[0]
    while op_name(node) in VIEWS:
        node = node.args[0]
    return op_name(node) in SOFTMAX


def both(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The operands of a multiplication, either way."""
    tensors = [arg for arg in node.args if is_tensor(arg)]
    return [(tensors[0], tensors[1]), (tensors[1], tensors[0])] if len(tensors) == 2 else []


def is_multiple(factor: fx.Node, weights: fx.Node, product: fx.Node) -> bool:
    """Of weights, by one number for all keys of a query."""
    sizes = shape_of(factor)
    fits = len(sizes) <= len(shape_of(product)) and (not sizes or sizes[-1] == 1)
    return fits and alike(weights, product) and is_weights(weights)


class Splitter:
    """Of one product, whose right operand is `values`."""

    def __init__(self, graph: fx.Graph, product: fx.Node):
        self.graph, self.product, self.values = graph, product, product.args[1]
        self.wholes: dict[tuple[fx.Node, int], fx.Node] = {}  # products of what is read in parts

    def times(self, weights: fx.Node) -> fx.Node:
        """`weights` @ `values`."""
        if op_name(weights) in SUMS:
            parts = [self.times(part) for part in weights.args[:2]]
            return emit(self.graph, weights.target, (*parts, *weights.args[2:]), self.product, weights.kwargs)
        if op_name(weights) == "mul":
            factor, rest = next(pair for pair in both(weights) if is_multiple(*pair, weights))
            return emit(self.graph, weights.target, (factor, self.times(rest)), self.product)
        if op_name(weights) == "select" and (whole := self.of_whole(weights)) is not None:
            return emit(self.graph, weights.target, (whole, *weights.args[1:]), self.product)
        return emit(self.graph, self.product.target, (weights, self.values), self.product)

    def of_whole(self, part: fx.Node) -> fx.Node | None:
        """The product of all that `part` is one of, along a dim of the batch; once for all parts."""
        source, values = part.args[0], self.values
        dim, before = part.args[1] % len(shape_of(source)), len(shape_of(source)) - 2
        if dim >= before or len(shape_of(values)) != len(shape_of(part)):
            return None
        if (source, dim) not in self.wholes:
            beside = emit(self.graph, aten.unsqueeze.default, (values, dim), self.product)
            self.wholes[source, dim] = emit(self.graph, self.product.target, (source, beside), self.product)
        return self.wholes[source, dim]
