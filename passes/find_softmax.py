"""A softmax that is spelled out becomes one.

    e = exp(x - amax(x, -1, True));  e / sum(e, -1, True)           ->  softmax(x, -1)
    e = exp(x);  (e @ v) / sum(e, -1, True)                         ->  softmax(x, -1) @ v
    e = exp2(x);  e / sum(e, -1, True)                              ->  softmax(x * ln 2, -1)
    exp(log_softmax(x, -1)),  exp(x - logsumexp(x, -1, True))       ->  softmax(x, -1)
    w = softmax(x, -1) * kept;  w / sum(w, -1, True)                ->  softmax(where(kept, x, -inf), -1)   kept: 0 or 1
    baddbmm(bias, q, k, alpha=a, beta=b)                            ->  bias * b + bmm(q, k) * a

What is taken off a whole row before exp changes nothing, and neither does its gradient. After: same numbers but for
rounding; a normalisation that is no softmax (an epsilon in its sum) stays as it was.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.contraction import Letters, product_of
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import argument, emit, is_tensor, op_name, shape_of, value_of
from ringopt.pipeline import Context, Pass

aten = torch.ops.aten


CASTS = ("to", "_to_copy", "type_as")
VIEWS = ("unsqueeze", "view", "reshape", "expand", "transpose", "permute", "slice", "select")


class FindSoftmax(Pass):
    name = "find_softmax"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        finder = Finder(gm.graph, context)
        for node in list(gm.graph.nodes):
            if op_name(node) == "baddbmm":
                split_baddbmm(gm.graph, node)
            elif op_name(node) == "exp":
                finder.of_logarithm(node)
            elif op_name(node) == "div" and all(is_tensor(arg) for arg in node.args[:2]) and not node.kwargs:
                finder.of_quotient(node) or finder.of_late_quotient(node)


def split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    bias, left, right = node.args[:3]
    with graph.inserting_before(node):
        total = scaled(graph, emit(graph, aten.bmm.default, (left, right), node), node.kwargs.get("alpha", 1), node)
        if (beta := node.kwargs.get("beta", 1)) != 0:  # at 0 the bias is not read, whatever it holds
            total = emit(graph, aten.add.Tensor, (scaled(graph, bias, beta, node), total), node)
    node.replace_all_uses_with(total)


def scaled(graph: fx.Graph, node: fx.Node, factor: Any, like: fx.Node) -> fx.Node:
    return node if factor == 1 else emit(graph, aten.mul.Scalar, (node, factor), like)


class Finder:
    """Of the quotients of one graph."""

    def __init__(self, graph: fx.Graph, context: Context):
        self.graph, self.constants = graph, Constants(graph, context.values, context.relied_on)

    def of_logarithm(self, node: fx.Node) -> None:
        """exp of the logarithms of weights."""
        found = log_weights(node.args[0])
        if found is not None:
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(emit(self.graph, aten.softmax.int, found, node))

    def of_quotient(self, node: fx.Node) -> bool:
        """e / sum(e) over one dim."""
        weights, total = node.args
        dim = summed_dim(total, weights)
        if dim is None or shape_of(node) != shape_of(weights):
            return False
        with self.graph.inserting_before(node):
            logits = self.logits_of(weights, dim, node)
            if logits is None:
                return False
            node.replace_all_uses_with(emit(self.graph, aten.softmax.int, (logits, dim), node))
        return True

    def of_late_quotient(self, node: fx.Node) -> bool:
        """(e @ v) / sum(e): dividing rows of the product divides rows of its left operand."""
        values, total = node.args
        product = product_of(values)
        for side in (0, 1) if product is not None else ():
            assert product is not None
            weights, letters = product.operands[side], product.letters[side]
            dim = summed_dim(total, weights)
            if dim is None or letters[dim] not in product.contracted or op_name(values) == "sum":
                continue
            if product.operands[0] is product.operands[1]:
                continue  # only one of both is divided
            if not divides_rows(total, dim, letters, product.out):
                continue
            with self.graph.inserting_before(values):
                logits = self.logits_of(weights, dim, node)
                if logits is None:
                    continue
                softmax = emit(self.graph, aten.softmax.int, (logits, dim), node)
                args = fx.map_arg(values.args, lambda arg: softmax if arg is weights else arg)  # noqa: B023
                node.replace_all_uses_with(emit(self.graph, values.target, args, values, values.kwargs))
            return True
        return False

    def logits_of(self, weights: fx.Node, dim: int, like: fx.Node) -> fx.Node | None:
        """x, where the weights are exp(x) or the softmax of x, of kept entries only."""
        kept: fx.Node | None = None
        if op_name(weights) == "mul" and all(is_tensor(arg) for arg in weights.args):
            for one, other in (weights.args, weights.args[::-1]):
                # A mask of more dims or of another dtype makes other weights of what it multiplies.
                if alike(one, weights) and (kept := self.truth_of(other, like)) is not None:
                    weights = one
                    break
        if op_name(weights) == "exp":
            logits = unshifted(weights.args[0], dim)
        elif op_name(weights) == "exp2":
            logits = emit(self.graph, aten.mul.Scalar, (unshifted(weights.args[0], dim), math.log(2)), like)
        elif op_name(weights) == "softmax" and argument(weights, 1, "dim") % len(shape_of(weights)) == dim:
            logits = weights.args[0] if kept is not None else None
        else:
            return None
        if logits is None or not value_of(weights).is_floating_point():
            return None
        if value_of(logits).dtype != value_of(weights).dtype:  # exp of integers, softmax in a wider dtype
            logits = emit(self.graph, aten.to.dtype, (logits, value_of(weights).dtype), like)
        if kept is None:
            return logits
        hidden = emit(self.graph, aten.logical_not.default, (kept,), like)
        return emit(self.graph, aten.masked_fill.Scalar, (logits, hidden, float("-inf")), like)

    def truth_of(self, node: fx.Node, like: fx.Node) -> fx.Node | None:
        """The bool tensor that `node` is, or holds as 0 and 1."""
        source = node
        while op_name(source) in CASTS and not is_bool(source):
            source = source.args[0]
        if is_bool(source):
            return source
        while op_name(source) in CASTS or is_view(source):
            source = source.args[0]
            if is_bool(source):
                return emit(self.graph, aten.ne.Scalar, (node, 0), like)
        value = self.constants.get(node)  # a triangle of ones that the program keeps
        if value is None or not bool(((value == 0) | (value == 1)).all()):
            return None
        return emit(self.graph, aten.ne.Scalar, (node, 0), like)


def divides_rows(total: fx.Node, dim: int, letters: Letters, out: Letters) -> bool:
    """Whether each dim of `total` (1 where it was summed) stands under the same axis of the product's output."""
    own = [None if i == dim or size == 1 else letters[i] for i, size in enumerate(shape_of(total))]
    if len(own) > len(out):
        return False
    below = out[len(out) - len(own) :]
    return all(mine is None or mine == theirs for mine, theirs in zip(own, below, strict=True))


def summed_dim(total: fx.Node, weights: fx.Node) -> int | None:
    """The dim over which `total` sums `weights`, kept as 1; None where it does not."""
    dims: Any = argument(total, 1, "dim")
    if op_name(total) != "sum" or total.args[0] is not weights or not argument(total, 2, "keepdim", False):
        return None
    dims = [dims] if isinstance(dims, int) else list(dims or [])
    same = value_of(total).dtype == value_of(weights).dtype
    return dims[0] % len(shape_of(weights)) if len(dims) == 1 and same else None


def log_weights(node: fx.Node) -> tuple[fx.Node, int] | None:
    """x and the dim of log_softmax(x, dim), or of x - logsumexp(x, dim, keepdim)."""
    if op_name(node) == "log_softmax" and value_of(node).dtype == value_of(node.args[0]).dtype:
        return node.args[0], argument(node, 1, "dim")
    if op_name(node) != "sub" or len(node.args) != 2 or node.kwargs or not all(map(is_tensor, node.args)):
        return None
    logits, total = node.args
    if op_name(total) != "logsumexp" or total.args[0] is not logits or not argument(total, 2, "keepdim", False):
        return None
    if not alike(logits, node) or not value_of(logits).is_floating_point():
        return None  # of integers
    dims = argument(total, 1, "dim")
    dims = [dims] if isinstance(dims, int) else list(dims)
    return (logits, dims[0]) if len(dims) == 1 else None


def is_view(node: fx.Node) -> bool:
    """Of the same numbers: a view as another dtype has others."""
    return op_name(node) in VIEWS and value_of(node).dtype == value_of(node.args[0]).dtype


def alike(one: fx.Node, other: fx.Node) -> bool:
    return shape_of(one) == shape_of(other) and bool(value_of(one).dtype == value_of(other).dtype)


def is_bool(node: fx.Node) -> bool:
    return is_tensor(node) and value_of(node).dtype == torch.bool


def unshifted(node: fx.Node, dim: int) -> fx.Node:
    """x of x - c, where c is one number for all of `dim`, made of x itself: its maximum."""
    if op_name(node) != "sub" or len(node.args) != 2 or node.kwargs or not all(is_tensor(arg) for arg in node.args):
        return node
    logits, shift = node.args
    source = shift
    while op_name(source) in ("detach", "getitem"):
        source = source.args[0]
    of_rows = len(shape_of(shift)) == len(shape_of(node)) and shape_of(shift)[dim] == 1
    largest = op_name(source) in ("amax", "max") and source.args[0] is logits
    return logits if of_rows and largest and shape_of(logits) == shape_of(node) else node
