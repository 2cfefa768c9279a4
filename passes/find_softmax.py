"""A softmax that is spelled out becomes one.

    e = exp(x - amax(x, -1, True));  e / sum(e, -1, True)           ->  softmax(x, -1)
    e = exp(x);  (e @ v) / sum(e, -1, True)                         ->  softmax(x, -1) @ v
    e = exp2(x);  e / sum(e, -1, True)                              ->  softmax(x * ln 2, -1)
    exp(log_softmax(x, -1)),  exp(x - logsumexp(x, -1, True))       ->  softmax(x, -1)
    w = softmax(x, -1) * kept;  w / sum(w, -1, True)                ->  softmax(where(kept, x, -inf), -1)   kept: 0 or 1
    baddbmm(bias, q, k, alpha=a, beta=b)                            ->  bias * b + bmm(q, k) * a; so with addmm

What is taken off a whole row before exp changes nothing, and neither does its gradient. After: same numbers but for
rounding; a normalisation that is no softmax (an epsilon in its sum) stays as it was. That is nothing to refuse, for
find_unfused says what is left of it, so this pass does not match, check and rewrite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.contraction import product_of
from ringopt.dims.op_families import CASTS
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import argument, emit, is_tensor, op_name, shape_of, value_of
from ringopt.pipeline import Context, Pass
from ringopt.recognize.softmax import (
    SUMMED,
    VIEWS,
    alike,
    divides_rows,
    is_bool,
    log_weights,
    split_sum,
    summed_dim,
    unshifted,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class FindSoftmax(Pass):
    """Rewrites each softmax that is spelled out in exp, sum and division as one node."""

    name = "find_softmax"
    reads = ("values",)
    writes = ("relied_on",)
    optional = True
    lost = "attention whose softmax is spelled out in exp and sum is not found"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        finder = Finder(gm.graph, context)
        for node in list(gm.graph.nodes):
            if op_name(node) in SUMMED:
                split_sum(gm.graph, node)
            elif op_name(node) == "exp":
                finder.of_logarithm(node)
            elif op_name(node) == "div" and all(is_tensor(arg) for arg in node.args[:2]) and not node.kwargs:
                finder.of_quotient(node) or finder.of_late_quotient(node)


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
            if (logits := self.logits_of(weights, dim, node)) is None:
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
            if product.operands[0] is product.operands[1] or not divides_rows(total, dim, letters, product.out):
                continue  # of a square only one factor is divided
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
        while op_name(source) in CASTS or op_name(source) in VIEWS:
            source = source.args[0]
            if is_bool(source):
                return emit(self.graph, aten.ne.Scalar, (node, 0), like)
        value = self.constants.get(node)  # a triangle of ones that the program keeps
        kept = value is not None and bool(((value == 0) | (value == 1)).all())
        return emit(self.graph, aten.ne.Scalar, (node, 0), like) if kept else None
