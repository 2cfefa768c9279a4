"""A softmax that is spelled out becomes one.

    e = exp(x - amax(x, -1, True));  e / sum(e, -1, True)           ->  softmax(x, -1)
    e = exp(x);  (e @ v) / sum(e, -1, True)                         ->  softmax(x, -1) @ v
    w = softmax(x, -1) * kept;  w / sum(w, -1, True)                ->  softmax(where(kept, x, -inf), -1)   kept: bool
    baddbmm(bias, q, k, alpha=a, beta=b)                            ->  bias * b + bmm(q, k) * a

What is taken off a whole row before exp changes nothing, and neither does its gradient. After: same numbers but for
rounding; a normalisation that is no softmax (an epsilon in its sum) stays as it was.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ringopt.graph.nodes import argument, emit, is_tensor, op_name, shape_of, value_of
from ringopt.graph.products import product_of
from ringopt.pipeline import Context, Pass

aten = torch.ops.aten


class FindSoftmax(Pass):
    name = "find_softmax"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node in list(gm.graph.nodes):
            if op_name(node) == "baddbmm":
                split_baddbmm(gm.graph, node)
            elif op_name(node) == "div" and all(is_tensor(arg) for arg in node.args[:2]) and not node.kwargs:
                of_quotient(gm.graph, node) or of_late_quotient(gm.graph, node)


def split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    bias, left, right = node.args[:3]
    with graph.inserting_before(node):
        total = scaled(graph, emit(graph, aten.bmm.default, (left, right), node), node.kwargs.get("alpha", 1), node)
        if (beta := node.kwargs.get("beta", 1)) != 0:  # at 0 the bias is not read, whatever it holds
            total = emit(graph, aten.add.Tensor, (scaled(graph, bias, beta, node), total), node)
    node.replace_all_uses_with(total)


def scaled(graph: fx.Graph, node: fx.Node, factor: Any, like: fx.Node) -> fx.Node:
    return node if factor == 1 else emit(graph, aten.mul.Scalar, (node, factor), like)


def of_quotient(graph: fx.Graph, node: fx.Node) -> bool:
    """e / sum(e) over one dim."""
    weights, total = node.args
    dim = summed_dim(total, weights)
    if dim is None or shape_of(node) != shape_of(weights):
        return False
    with graph.inserting_before(node):
        logits = logits_of(graph, weights, dim, node)
        if logits is None:
            return False
        node.replace_all_uses_with(emit(graph, aten.softmax.int, (logits, dim), node))
    return True


def of_late_quotient(graph: fx.Graph, node: fx.Node) -> bool:
    """(e @ v) / sum(e): dividing rows of the product divides rows of its left operand."""
    values, total = node.args
    product = product_of(values)
    for side in (0, 1) if product is not None else ():
        assert product is not None
        weights, letters = product.operands[side], product.letters[side]
        dim = summed_dim(total, weights)
        if dim is None or letters[dim] not in product.contracted or op_name(values) == "sum":
            continue
        if not divides_rows(total, dim, letters, product.out, shape_of(values)):
            continue
        with graph.inserting_before(values):
            logits = logits_of(graph, weights, dim, node)
            if logits is None:
                continue
            softmax = emit(graph, aten.softmax.int, (logits, dim), node)
            args = fx.map_arg(values.args, lambda arg: softmax if arg is weights else arg)  # noqa: B023
            node.replace_all_uses_with(emit(graph, values.target, args, values, values.kwargs))
        return True
    return False


def divides_rows(total: fx.Node, dim: int, letters: Any, out: Any, shape: tuple[int, ...]) -> bool:
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


def logits_of(graph: fx.Graph, weights: fx.Node, dim: int, like: fx.Node) -> fx.Node | None:
    """x, where the weights are exp(x) or the softmax of x, of kept entries only."""
    kept: fx.Node | None = None
    if op_name(weights) == "mul" and all(is_tensor(arg) for arg in weights.args):
        for one, other in (weights.args, weights.args[::-1]):
            if (kept := truth_of(other)) is not None:
                weights = one
                break
    if op_name(weights) == "exp":
        logits = unshifted(weights.args[0], dim)
    elif op_name(weights) == "softmax" and argument(weights, 1, "dim") % len(shape_of(weights)) == dim:
        logits = weights.args[0] if kept is not None else None
    else:
        return None
    if logits is None or kept is None:
        return logits
    hidden = emit(graph, aten.logical_not.default, (kept,), like)
    return emit(graph, aten.masked_fill.Scalar, (logits, hidden, float("-inf")), like)


def truth_of(node: fx.Node) -> fx.Node | None:
    """The bool tensor that `node` is, or holds as 0 and 1."""
    while is_tensor(node) and op_name(node) in ("to", "_to_copy", "type_as") and value_of(node).dtype != torch.bool:
        node = node.args[0]
    return node if is_tensor(node) and value_of(node).dtype == torch.bool else None


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
