"""How a softmax is spelled out (sums of what is divided by them, logarithms of weights, the shift by a maximum), and
weights that are a sum or a difference of softmaxes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.contraction import Letters
from ringopt.dims.op_families import CASTS, PERMUTATIONS, RESHAPES, SLICES, SOFTMAXES
from ringopt.dims.origin import is_weight
from ringopt.expr.simplify import negate
from ringopt.expr.terms import Apply, Load, Term
from ringopt.ir.nodes import argument, emit, is_tensor, op_name, shape_of, value_of

aten = torch.ops.aten

VIEWS = (*RESHAPES, *PERMUTATIONS, *SLICES, "expand", "unsqueeze", "select")
SUMS = ("add", "sub")
CONVERSIONS = (*RESHAPES, *CASTS)  # between a softmax and the part of it that is read


SUMMED = {"baddbmm": aten.bmm.default, "addmm": aten.mm.default}  # with the product that something is added to


def split_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Replaces a product that something is added to by the product, scale and addition; a layer with its bias stays one
    operator."""
    bias, left, right = node.args[:3]
    if op_name(node) == "addmm" and (is_weight(left) or is_weight(right)):
        return
    with graph.inserting_before(node):
        product = emit(graph, SUMMED[op_name(node)], (left, right), node)
        total = _scaled(graph, product, node.kwargs.get("alpha", 1), node)
        if (beta := node.kwargs.get("beta", 1)) != 0:  # at 0 the bias is not read, whatever it holds
            total = emit(graph, aten.add.Tensor, (_scaled(graph, bias, beta, node), total), node)
    node.replace_all_uses_with(total)


def _scaled(graph: fx.Graph, node: fx.Node, factor: Any, like: fx.Node) -> fx.Node:
    return node if factor == 1 else emit(graph, aten.mul.Scalar, (node, factor), like)


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


def same_dtype(one: fx.Node, other: fx.Node) -> bool:
    """Whether both are multiplied in one dtype."""
    return bool(value_of(one).dtype == value_of(other).dtype)


def alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have one shape and one dtype."""
    return shape_of(one) == shape_of(other) and same_dtype(one, other)


def is_bool(node: fx.Node) -> bool:
    """Whether a node is a tensor of dtype bool."""
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


# ---- zeros for NaN ---------------------------------------------------------------------------------------------------
def puts_zero(term: Apply) -> bool:
    """Whether it is a nan_to_num that puts 0 for NaN; a weight is never infinite."""
    return term.op == "nan_to_num" and not term.kwargs and (len(term.args) == 1 or not term.args[1])


def is_number(condition: Term, weight: Term) -> bool:
    """~isnan(weight), or weight == weight."""
    inner = negate(condition)
    if isinstance(inner, Apply) and inner.op == "isnan":
        return inner.args[0] is weight
    return isinstance(inner, Apply) and inner.op == "ne" and inner.args[0] is weight and inner.args[1] is weight


def elements_of(holds: Term) -> tuple[Load, bool, int, bool] | None:
    """Of `any` over one dim, or of `not all`: the element of the result, whether it is `any`, and the dim that it is
    over, and whether that is kept as 1."""
    truth = not (isinstance(holds, Apply) and holds.op == "logical_not")
    row = holds if truth else holds.args[0]  # type: ignore[attr-defined]
    if not isinstance(row, Load) or not isinstance(row.source, fx.Node):
        return None
    dim = argument(row.source, 1, "dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    if op_name(row.source) != ("any" if truth else "all") or not isinstance(dim, int):
        return None
    return row, truth, dim % len(shape_of(row.source.args[0])), bool(argument(row.source, 2, "keepdim", False))


def says_seen(node: fx.Node, logits: fx.Node) -> bool | None:
    """True for logits != -inf, element by element, False for logits == -inf, None for anything else."""
    if op_name(node) in ("logical_not", "bitwise_not"):
        inner = says_seen(node.args[0], logits)
        return None if inner is None else not inner
    if node.args[:1] != (logits,):
        return None
    if op_name(node) == "isneginf":
        return False
    return op_name(node) == "ne" if op_name(node) in ("eq", "ne") and node.args[1] == -math.inf else None


# ---- sums of softmaxes -----------------------------------------------------------------------------------------------
def unturned(weights: fx.Node) -> fx.Node:
    """The value that `weights` is a transposition of, through nodes with one user."""
    while op_name(weights) in PERMUTATIONS and len(weights.users) == 1:
        weights = weights.args[0]
    return weights


def is_sum(weights: fx.Node) -> bool:
    """Of two tensors of its shape, each made of a softmax, for one product alone."""
    if op_name(weights) not in SUMS or len(weights.users) != 1 or not all(map(is_tensor, weights.args[:2])):
        return False
    return all(
        shape_of(part) == shape_of(weights) and same_dtype(part, weights) and is_weights(part)
        for part in weights.args[:2]
    )


def is_weights(node: fx.Node) -> bool:
    """A softmax, a view or a part of one, or a multiple of that."""
    if op_name(node) in SUMS:
        return is_sum(node)
    if (rest := without_number(node)) is not None:
        return is_weights(rest)
    if op_name(node) == "mul":
        return any(is_multiple(one, other, node) for one, other in both(node))
    if op_name(node) == "select":
        node = node.args[0]
    while op_name(node) in CONVERSIONS:
        node = node.args[0]
    return op_name(node) in SOFTMAXES


def without_number(node: fx.Node) -> fx.Node | None:
    """What a multiple by a Python number is made of; None for anything else."""
    plain = op_name(node) in ("mul", "div") and len(node.args) == 2 and not node.kwargs
    return node.args[0] if plain and is_tensor(node.args[0]) and isinstance(node.args[1], (int, float)) else None


def both(node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The operands of a multiplication, either way."""
    tensors = [arg for arg in node.args if is_tensor(arg)]
    return [(tensors[0], tensors[1]), (tensors[1], tensors[0])] if len(tensors) == 2 else []


def is_multiple(factor: fx.Node, weights: fx.Node, product: fx.Node) -> bool:
    """Of weights, by one number for all keys of a query."""
    sizes = shape_of(factor)
    fits = len(sizes) <= len(shape_of(product)) and (not sizes or sizes[-1] == 1)
    return fits and shape_of(weights) == shape_of(product) and same_dtype(weights, product) and is_weights(weights)
