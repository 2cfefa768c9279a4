"""Attention that is spelled out, found by its axes.

A product brings an axis that only one of its operands has, a softmax runs over that axis, and a second product sums it
away against another tensor. Whatever views, scalings, masks, casts and dropout stand between, this is attention: the
axis is the keys', the operand that has it K, the other Q, the third tensor V.

`candidates` finds such triples by following the axes of every product downwards (ringopt/dims/follow.py); `Roles` says
which axis is batch, head, query, key or feature. Nothing is proved here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.fx as fx

from ringopt.dims.contraction import Product, product_of
from ringopt.dims.follow import Axes, Dims, follow
from ringopt.dims.op_families import SOFTMAXES
from ringopt.ir.nodes import argument, op_name, shape_of, tensor_args
from ringopt.recognize.scores import NotAttention

EXPONENTIALS = ("exp", "exp2")


@dataclass(frozen=True)
class Candidate:
    """`scores` [q, k axes] -> `softmax` -> `values`, a product whose operand `side` is made of the weights.

    dims   axes of every value between
    """

    scores: Product
    softmax: fx.Node
    values: Product
    side: int
    axes: Axes
    dims: Mapping[fx.Node, Dims]

    @property
    def weights(self) -> fx.Node:
        """What the values are multiplied with: the softmax, or what became of it."""
        return self.values.operands[self.side]

    @property
    def value(self) -> fx.Node:
        return self.values.operands[1 - self.side]

    @property
    def keys(self) -> tuple[str, ...]:
        """The axes that softmax runs over."""
        dim = argument(self.softmax, 1, "dim") % len(shape_of(self.softmax))
        return self.axes.whole(self.dims[self.softmax][dim])

    @property
    def key_side(self) -> int | None:
        """Which operand of the first product alone brings the keys."""
        for side in (0, 1):
            if any(self.axes.whole((letter,)) == self.keys for letter in self.scores.own(side)):
                return side
        return None

    def as_it_stands(self) -> Candidate:
        """With the operands that its products have now: an attention before it may have been rewritten."""
        scores, values = product_of(self.scores.node), product_of(self.values.node)
        assert scores is not None and values is not None
        return replace(self, scores=scores, values=values)

    @property
    def summed(self) -> tuple[str, ...]:
        """The axes that the second product sums away."""
        dims = zip(self.values.letters[self.side], self.dims[self.weights], strict=True)
        return self.axes.whole([axis for letter, dim in dims if letter in self.values.contracted for axis in dim])


def candidates(products: Mapping[fx.Node, Product], between: Sequence[str] = SOFTMAXES) -> Iterator[Candidate]:
    """Every product, softmax (or another of the operators `between`) and second product on one way down, in the order
    of the graph."""
    for scores in products.values():
        axes = Axes({letter: size for letter, size in scores.sizes().items()})
        dims: dict[fx.Node, Dims] = {}
        below: dict[fx.Node, fx.Node] = {}
        ends: dict[tuple[fx.Node, int], tuple[Product, fx.Node]] = {}
        start: Dims = tuple((letter,) if letter else () for letter in scores.out)
        for node, found in follow(scores.node, start, axes):
            dims[node] = found
            above = [below[arg] for arg in tensor_args(node) if arg in below]
            if op_name(node) in between:
                below[node] = node
            elif above:
                below[node] = above[0]
            if node not in below:
                continue
            for user in node.users:
                for product, side in operand_of(user, node, products):
                    ends[user, side] = product, below[node]
        for (_, side), (values, softmax) in ends.items():
            yield Candidate(scores, softmax, values, side, axes, dims)


def operand_of(user: fx.Node, node: fx.Node, products: Mapping[fx.Node, Product]) -> Iterator[tuple[Product, int]]:
    """The product that `user` is, or that a multiplication it is summed from is, with `node` as an operand."""
    for place in (user, *user.users):
        if place in products:
            for side in (0, 1):
                if products[place].operands[side] is node:
                    yield products[place], side


def softmaxes(graph: fx.Graph) -> list[fx.Node]:
    """The softmax nodes of a graph, in its order."""
    return [node for node in graph.nodes if op_name(node) in SOFTMAXES]


def products_of(graph: fx.Graph) -> dict[fx.Node, Product]:
    """Each matrix product of a graph, with the dims that it contracts."""
    return {node: product for node in graph.nodes if (product := product_of(node)) is not None}


def exponentials(graph: fx.Graph) -> Iterator[fx.Node]:
    """Weights that are exponentials of scores, and were made no softmax (passes/find_softmax.py)."""
    alive = {node for node in graph.nodes if op_name(node) in EXPONENTIALS and leads_anywhere(node)}
    if alive:
        weights = (one.softmax for one in candidates(products_of(graph), EXPONENTIALS) if one.summed)
        yield from filter(alive.__contains__, dict.fromkeys(weights))


@dataclass(frozen=True)
class Roles:
    """Every axis of the scores, in its role.

    batch     shared by K or V: [B] of the canonical operator, the last of them its KV heads
    groups    of Q alone, beside the queries: query heads that share a KV head
    queried   whether Q has an axis of queries, be it of one
    """

    candidate: Candidate
    batch: tuple[str, ...]
    groups: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    queried: bool

    @classmethod
    def of(cls, candidate: Candidate) -> Roles:
        axes, scores, key_side = candidate.axes, candidate.scores, candidate.key_side
        assert key_side is not None
        in_values = cls.shared_with_values(candidate)
        letters = [letter for letter in scores.out if letter]
        alone = [letter for letter in scores.own(1 - key_side) if not set(axes.whole((letter,))) & in_values]
        query = cls.query_of(alone, candidate)
        batch = [axis for each in letters if each not in alone for axis in axes.whole((each,))]
        return cls(
            candidate,
            tuple(axis for axis in batch if axis not in candidate.keys),
            tuple(axis for each in alone if each != query for axis in axes.whole((each,))),
            axes.whole((query,)) if query else (),
            candidate.keys,
            query is not None,
        )

    @staticmethod
    def shared_with_values(candidate: Candidate) -> set[str]:
        letters = candidate.values.letters
        dims = zip(letters[candidate.side], candidate.dims[candidate.weights], strict=True)
        return {
            axis
            for letter, dim in dims if letter and letter in letters[1 - candidate.side]
            for axis in candidate.axes.whole(dim)
        }  # fmt: skip

    @staticmethod
    def query_of(alone: list[str], candidate: Candidate) -> str | None:
        """Of the axes that K and V lack, the one that is counted like the keys, else the longest, else the last."""
        sizes, keys = candidate.axes.sizes, candidate.axes.size(candidate.keys)
        return max(
            alone, key=lambda letter: (bool(sizes[letter] == keys), sizes[letter], alone.index(letter)), default=None
        )

    @cached_property
    def canonical(self) -> dict[str, tuple[str, ...]]:
        """The axes behind b, h, q, k, outermost first."""
        lead, heads = (self.batch[:-1], self.batch[-1:]) if len(self.batch) > 1 else (self.batch, ())
        return {"b": lead, "h": (*heads, *self.groups), "q": self.queries, "k": self.keys}

    @property
    def kv_heads(self) -> tuple[str, ...]:
        return self.batch[-1:] if len(self.batch) > 1 else ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {name: self.candidate.axes.size(axes) for name, axes in self.canonical.items()}


# ---- weights that are used elsewhere ---------------------------------------------------------------------------------
KEPT = frozenset(("mean", "sum", "div", "mul", "stack", "cat", "getitem"))  # on the way to an output, with numbers only


def escapes(candidate: Candidate, dropout_p: float) -> bool:
    """Whether the program returns its weights too: they may be computed beside the attention. Raises NotAttention for
    weights that take part in what follows."""
    end = candidate.values.node
    inside = ways_between(candidate.softmax, end)
    ordered = [node for node in end.graph.nodes if node in inside]
    users = [user for node in ordered for user in node.users if user not in inside and user is not end]
    others = [user for user in users if leads_anywhere(user)]
    if not all(map(only_leaves, others)):
        names = ", ".join(dict.fromkeys(op_name(user) or user.op for user in others))
        raise NotAttention(f"its weights are used elsewhere too, by {names}", True)
    if others and dropout_p:
        raise NotAttention("the program returns its weights after dropout: attention would drop others")
    return bool(others)


def ways_between(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """The nodes on the ways from `start` to `end`, without `end`."""
    found: set[fx.Node] = set()
    stack = [end]
    reached = {start}
    node = start
    while node is not end:
        node = node.next
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    while stack:
        for above in stack.pop().all_input_nodes:
            if above in reached and above not in found:
                found.add(above)
                stack.append(above)
    return found


def leads_anywhere(node: fx.Node) -> bool:
    """Whether an output of the program depends on `node`."""
    seen, stack = {node}, [node]
    while stack:
        each = stack.pop()
        if each.op == "output":
            return True
        for user in each.users:
            if user not in seen:
                seen.add(user)
                stack.append(user)
    return False


def only_leaves(node: fx.Node) -> bool:
    """Whether the way from `node` ends in outputs and meets no other value, but for views and means."""
    if node.op == "output":
        return True
    alone = len(node.all_input_nodes) == 1 or op_name(node) in ("stack", "cat")
    plain = op_name(node) in KEPT or torch.Tag.pointwise not in getattr(node.target, "tags", ())
    return alone and plain and all(map(only_leaves, node.users))
