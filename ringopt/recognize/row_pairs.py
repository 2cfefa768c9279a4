"""Unrecognised [Sq, Sk] computation: attention that could not be proved, and other mixing of tokens by pairs.

    scores = q @ k.mT;  w = relu(scores) or softmax(talk(scores));  y = w @ v

    scores = q @ k.mT;  chosen = zeros.scatter(-1, scores.topk(8).indices, True)

Whatever the weights are, they are computed query by query: a rank with its shard of the queries, and replicated keys
and values, computes its shard of y. So are scores by which each query picks keys, or that an attention reads. Found by
two axes of a product, one from each operand, and what leaves one of them alone: another product that sums the other
away, a choice along it, or an attention that reads rows. Nothing is proved here: sharding does only what its rules
allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product as all_pairs

import torch.fx as fx

from ringopt.calls import AttentionCall
from ringopt.dims.contraction import Product, product_of
from ringopt.dims.follow import ALONG, along
from ringopt.dims.op_families import RESHAPES, SOFTMAXES
from ringopt.dims.origin import FEATURES_SECOND, Origin, is_learned, is_row, is_weight, origins
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import is_aten, is_tensor, op_name, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ops import operators

# They mix along a dim, or over channels, or go by the place, and keep all dims.
MIXING = frozenset(
    (*SOFTMAXES, "log_softmax", "dropout", "cumsum", "sort", "getitem", "tril", "triu", *FEATURES_SECOND)
)

# They pick some of what stands along a dim, by their size.
CHOICES = frozenset(("topk", "argmax", "argmin", "max", "min", "amax", "amin", "kthvalue"))

NO_SITE = "are no site: each rank computes the rows of its own queries, with keys and values gathered"  # for the report

Axes = tuple[Sharded, Sharded]  # one axis of each operand
Rows = tuple[fx.Node, Sharded]
Ends = list[tuple[int, list[Rows]]]  # the side that remains, and what is weighed along the other


@dataclass(frozen=True)
class Pairs:
    """`rows`: which dim of the `queries` is the sequence. `others`: keys, and values that are weighed, with their dims
    of the other sequence. `weights`: values with both sequences, from the product of queries and keys on, with their
    dims of queries and of keys."""

    queries: fx.Node
    rows: Sharded
    others: tuple[Rows, ...]
    weights: dict[fx.Node, tuple[int, int]]


def pairs_in(graph: fx.Graph) -> dict[fx.Node, Pairs]:
    """All pairs of a graph, by the product of queries and keys."""
    found: dict[fx.Node, Pairs] = {}
    for node in graph.nodes:
        product = product_of(node)
        if product is None or not product.own(0) or not product.own(1):
            continue
        if any(map(is_weight, product.operands)) or any(map(is_learned, product.operands)):
            continue
        for axes in all_pairs(rows_of(product, 0), rows_of(product, 1)):
            if weighs_rows(product, axes):
                continue
            ends, weights = weighing(node, (_at(product, axes[0]), _at(product, axes[1])))
            sides = [_operand(product, side, axes[side]) for side in (0, 1)]
            for side, values in ends:
                found[node] = Pairs(*sides[side], (sides[1 - side], *values), weights)
    return found


def _operand(product: Product, side: int, letter: str) -> Rows:
    operand, dim = product.operands[side], product.letters[side].index(letter)
    return operand, Sharded(dim, 1, shape_of(operand)[dim], 1)


def rows_of(product: Product, side: int) -> list[str]:
    """The axes that one operand alone has and that are sequences: of inputs, or of patches that a view has put side by
    side."""
    operand, letters = product.operands[side], product.letters[side]

    def counts_rows(letter: str) -> bool:
        return any(is_row(end) or is_merged(end) for end in origins(operand, letters.index(letter)))

    return [letter for letter in product.own(side) if counts_rows(letter)]


def weighs_rows(product: Product, axes: tuple[str, str]) -> bool:
    """Whether a product sums rows of both operands, and the rows of `axes`, which it keeps, are of two sequences: what
    one operand has beside the rows that are summed (aligned sequences, frames) is no key of the other."""
    summed = all(row_origins(product, side, product.contracted) for side in (0, 1))
    return summed and not row_origins(product, 0, axes[0]) & row_origins(product, 1, axes[1])


def row_origins(product: Product, side: int, letters: Iterable[str]) -> set[Origin]:
    """The rows of inputs that these axes of an operand come from."""
    operand, places = product.operands[side], product.letters[side]
    return {end for letter in letters for end in origins(operand, places.index(letter)) if is_row(end)}


def is_merged(origin: Origin) -> bool:
    """Whether the way up ends at a view that makes one dim of several, as of the height and the width of a picture."""
    return origin.kind == "unknown" and op_name(origin.node) in RESHAPES


def _at(product: Product, letter: str) -> Sharded:
    dim = product.out.index(letter)
    return Sharded(dim, 1, shape_of(product.node)[dim], 1)


def weighing(start: fx.Node, axes: Axes) -> tuple[Ends, dict[fx.Node, tuple[int, int]]]:
    """Where one of the axes is left alone; and the values with both axes until then, with the dims of these."""
    ends: Ends = []
    pending, seen = [(start, axes)], set[tuple[fx.Node, Axes]]()
    while pending:
        node, here = pending.pop()
        if (node, here) in seen:
            continue
        seen.add((node, here))
        for user in node.users:
            for index in (i for i, arg in enumerate(tensor_args(user)) if arg is node):
                below, left = after(user, index, here)
                ends += left
                pending += below
    return ends, {node: (first.dim, second.dim) for node, (first, second) in seen}


def after(user: fx.Node, index: int, axes: Axes) -> tuple[list[tuple[fx.Node, Axes]], Ends]:
    """The dims of both axes in the output of `user`, whose `index`-th operand has them; or which of them remains."""
    if user.op != "call_function":
        return [], []
    operands = list(tensor_args(user))
    operand = operands[index]
    if user.target is operators.attention.default:
        return [], read_by(user, operand, axes)
    if op_name(user) in MIXING and is_tensor(user) and shape_of(user)[-2:] == shape_of(operand)[-2:]:
        return [(user, axes)], []
    if (longer := lengthened(user, operand, axes)) is not None:
        return [(user, longer)], []
    rule = rule_of(user) if is_aten(user) else None
    if rule is None or len(rule.operands) != len(operands):
        return [], []
    kept = [rule.push(index, place) for place in axes]
    if kept[0] is not None and kept[1] is not None:
        return [(user, (kept[0], kept[1]))], []
    ends: Ends = []
    for side in (side for side in (0, 1) if kept[side] is not None):
        summed = rule.sums(index, axes[1 - side])
        if summed is not None:
            others = zip(operands, summed, strict=True)
            ends.append((side, [(x, at) for x, at in others if at is not None and x is not operand]))
        elif op_name(user) in CHOICES:
            ends.append((side, []))
    return [], ends


def read_by(attention: fx.Node, source: fx.Node, axes: Axes) -> Ends:
    """The side whose tokens are the queries of an attention that reads scores of other pairs by rows."""
    call = AttentionCall.of(attention)
    rows = {dim for i, dim in call.mask_term.row_dims.items() if call.sources[i] is source}
    return [(side, []) for side in (0, 1) if axes[side].dim in rows and axes[side].outer * axes[side].inner == 1]


def lengthened(user: fx.Node, operand: fx.Node, axes: Axes) -> Axes | None:
    """The axes where `user` puts something beside one of them (an extra score of each row), or cuts it off again; None
    of what does anything else."""
    if op_name(user) not in ALONG or not is_tensor(user) or len(shape_of(user)) != len(shape_of(operand)):
        return None
    touched = along(user)
    kept = [place.dim for place in axes if place.dim not in touched]
    sizes = zip(shape_of(operand), shape_of(user), strict=True)
    if len(kept) != 1 or any(old != new for dim, (old, new) in enumerate(sizes) if dim not in touched):
        return None
    first, second = (Sharded(place.dim, 1, shape_of(user)[place.dim], 1) for place in axes)
    return first, second
