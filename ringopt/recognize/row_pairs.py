"""Unrecognised [Sq, Sk] computation: attention that could not be proved, and other mixing of tokens by pairs.

    scores = q @ k.mT;  w = relu(scores) or softmax(talk(scores));  y = w @ v

Whatever the weights are, they are computed query by query: a rank with its shard of the queries, and replicated keys
and values, computes its shard of y. Found by two axes of a product, one from each operand, and another product that
sums one of them away. Nothing is proved here: sharding does only what its rules allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as all_pairs

import torch.fx as fx

from ringopt.dims.contraction import Product, product_of
from ringopt.dims.follow import ALONG, along
from ringopt.dims.op_families import SOFTMAXES
from ringopt.dims.origin import FEATURES_SECOND, is_learned, is_row, is_weight, origins
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import is_aten, is_tensor, op_name, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open

# They mix along a dim, or over channels, and keep all dims.
MIXING = frozenset((*SOFTMAXES, "log_softmax", "dropout", "cumsum", "sort", "getitem", *FEATURES_SECOND))

NO_SITE = "are no site: each rank computes the rows of its own queries, with keys and values whole"  # for the report

Axes = tuple[Sharded, Sharded]  # one axis of each operand


@dataclass(frozen=True)
class Pairs:
    """`rows`: which dim of the `queries` is the sequence. `weights`: values with both sequences, from the product of
    queries and keys on, with their dims of queries and of keys."""

    queries: fx.Node
    rows: Sharded
    weights: dict[fx.Node, tuple[int, int]]


def pairs_in(graph: fx.Graph) -> dict[fx.Node, Pairs]:
    """All pairs of a graph, by the product of queries and keys."""
    found: dict[fx.Node, Pairs] = {}
    for node in graph.nodes:
        product = product_of(node)
        if product is None or not product.own(0) or not product.own(1):
            continue
        if any(map(is_open, shape_of(node))):
            continue  # Inductor (torch 2.13) lowers no bmm of rows whose number is not known
        if any(map(is_weight, product.operands)) or any(map(is_learned, product.operands)):
            continue
        for axes in all_pairs(rows_of(product, 0), rows_of(product, 1)):
            sides, weights = weighing(node, (_at(product, axes[0]), _at(product, axes[1])))
            for side in sides:
                operand = product.operands[side]
                dim = product.letters[side].index(axes[side])
                found[node] = Pairs(operand, Sharded(dim, 1, shape_of(operand)[dim], 1), weights)
    return found


def rows_of(product: Product, side: int) -> list[str]:
    """The axes that one operand alone has and that are sequences."""
    operand, letters = product.operands[side], product.letters[side]
    return [letter for letter in product.own(side) if any(map(is_row, origins(operand, letters.index(letter))))]


def _at(product: Product, letter: str) -> Sharded:
    dim = product.out.index(letter)
    return Sharded(dim, 1, shape_of(product.node)[dim], 1)


def weighing(start: fx.Node, axes: Axes) -> tuple[set[int], dict[fx.Node, tuple[int, int]]]:
    """The sides whose axis remains where another product sums the other's away; and the values with both axes until
    then, with the dims of these."""
    sides: set[int] = set()
    pending, seen = [(start, axes)], set[tuple[fx.Node, Axes]]()
    while pending:
        node, here = pending.pop()
        if (node, here) in seen:
            continue
        seen.add((node, here))
        for user in node.users:
            for index in (i for i, arg in enumerate(tensor_args(user)) if arg is node):
                below, summed = after(user, index, here)
                sides |= summed
                pending += below
    return sides, {node: (first.dim, second.dim) for node, (first, second) in seen}


def after(user: fx.Node, index: int, axes: Axes) -> tuple[list[tuple[fx.Node, Axes]], set[int]]:
    """The dims of both axes in the output of `user`, whose `index`-th operand has them; or which of them remains."""
    if user.op != "call_function":
        return [], set()
    operand = list(tensor_args(user))[index]
    if op_name(user) in MIXING and is_tensor(user) and shape_of(user)[-2:] == shape_of(operand)[-2:]:
        return [(user, axes)], set()
    if (longer := lengthened(user, operand, axes)) is not None:
        return [(user, longer)], set()
    rule = rule_of(user) if is_aten(user) else None
    if rule is None or len(rule.operands) != len(list(tensor_args(user))):
        return [], set()
    first, second = (rule.push(index, place) for place in axes)
    if first is not None and second is not None:
        return [(user, (first, second))], set()
    left = {0} if first is not None and rule.sums(index, axes[1]) else set[int]()
    return [], left | ({1} if second is not None and rule.sums(index, axes[0]) else set[int]())


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
