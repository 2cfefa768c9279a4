"""Sums over picked tokens, as sums over all.

    loss = cross_entropy(head(y[mask]), t[mask])
        ->
    part = cross_entropy(head(y[mask]), t[mask], reduction="none")
    loss = zeros(mask.shape).index_put(mask, part).sum() / ...      # as many as count

A value that is put back where its token was has tokens itself, so each rank makes those of its own (stretches.py). What
is summed then has the sizes of the mask, 0 for tokens that were not picked.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from ringopt.frontend.data_sizes.fake_values import fake_value, is_picked, made_like, memory
from ringopt.ir.nodes import bound, called_name, written_by_name
from ringopt.ir.symbolic_sizes import formula
from ringopt.torch_compat.dynamo import COMPARISONS
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.symbolic_shapes import free_unbacked_symbols

SUMS = frozenset(("sum", "mean"))
BY_CLASS = (F.cross_entropy, F.nll_loss)
FINDS = ("nonzero", "where")  # which elements are not 0, where they are given one tensor
LOSSES = (
    *BY_CLASS, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
)  # fmt: skip


def sum_by_token(graph: fx.Graph) -> None:
    """Rewrites Dynamo's `graph`."""
    written = {memory(x) for node in graph.nodes for x in written_by_name(node)} - {None}
    one_mask(graph, written)
    sums = [summed for node in graph.nodes if (summed := Summed.of(node, written)) is not None]
    later = behind(graph, {summed.node for summed in sums}, written) if sums else None
    if later is None:
        return
    for summed in sums:
        summed.put_back()
    place = next(node for node in reversed(graph.nodes) if works_on_picked(node))
    for summed in sums:
        place = summed.add_up(place)
    for node in later:
        if node < place:
            place.append(node)
            place = node


def behind(graph: fx.Graph, sums: set[fx.Node], written: set[Any]) -> list[fx.Node] | None:
    """What is made of `sums`, all of which may stand behind all that works on picked tokens; None where it may not, as
    where it reads what is `written` in place."""
    found = dict.fromkeys(sums)
    for node in graph.nodes:
        if found.keys().isdisjoint(node.all_input_nodes) or node.op == "output":
            continue
        if works_on_picked(node) or not written.isdisjoint(map(memory, node.all_input_nodes)):
            return None
        found[node] = None
    return [node for node in found if node not in sums]


def works_on_picked(node: fx.Node) -> bool:
    """Whether it has a size that nothing foretells, or an operand of it has."""
    return is_picked(node) or any(map(is_picked, node.all_input_nodes))


def reduction_of(node: fx.Node) -> str | None:
    """"sum" or "mean", where all elements of what it is given are added up; None of anything else."""
    if node.target in LOSSES:
        given = bound(node)
        others = ["size_average", "reduce", *(["weight"] if node.target not in BY_CLASS else [])]
        plain = all(given.get(name) is None for name in others)
        return given["reduction"] if given["reduction"] in SUMS and plain else None
    name = called_name(node)
    plain = node.op in ("call_method", "call_function") and len(node.args) == 1 and not node.kwargs
    return name if plain and name in SUMS and isinstance(node.args[0], fx.Node) else None


def tensors_of(node: fx.Node) -> list[fx.Node]:
    """What has rows: of a loss its input and target."""
    given = [bound(node)[name] for name in ("input", "target")] if node.target in LOSSES else node.args[:1]
    return [x for x in given if isinstance(x, fx.Node)]


def mask_at(node: fx.Node) -> fx.Node | None:
    """The mask by which `node` picks tokens, or looks for their numbers."""
    if node.target is operator.getitem and isinstance(fake_value(node), Tensor):
        at = node.args[1][0] if isinstance(node.args[1], tuple) and len(node.args[1]) == 1 else node.args[1]
        return at if isinstance(at, fx.Node) and is_mask(at) else None
    if called_name(node) in FINDS and len(node.args) == 1 and is_mask(node.args[0]):
        return node.args[0]
    return None


def is_mask(node: Any) -> bool:
    """Whether it is a tensor of bools."""
    return isinstance(node, fx.Node) and isinstance(fake_value(node), Tensor) and fake_value(node).dtype == torch.bool


def is_class(target: fx.Node) -> bool:
    """Whether the target of a loss is numbers of classes, and not the probability of each."""
    return not fake_value(target).is_floating_point()


def picks_of(node: fx.Node) -> list[fx.Node]:
    """What of that which it reads is picked by masks, or says where they are true."""
    found, pending, seen = list[fx.Node](), list(tensors_of(node)), set[fx.Node]()
    while pending:
        x = pending.pop()
        if x not in seen:
            seen.add(x)
            picks = mask_at(x) is not None
            found += [x] if picks else []
            pending += x.all_input_nodes if not picks else []
    return found


def count_of(pick: fx.Node) -> Any:
    """As a symbol, how many tokens it has: the first size of it, or of its elements."""
    return next(formula(x.shape[0]) for x in tree_leaves(fake_value(pick)) if isinstance(x, Tensor))


def one_mask(graph: fx.Graph, written: set[Any]) -> None:
    """A mask that is spelled twice (`h[t != -100]`, `t[t != -100]`) is one."""
    first = dict[object, fx.Node]()
    for node in list(graph.nodes):
        if node.target not in COMPARISONS or not is_mask(node) or node.kwargs:
            continue
        if written.isdisjoint(map(memory, (node, *node.all_input_nodes))):
            known = first.setdefault((node.target, repr(node.args)), node)
            if known is not node:
                node.replace_all_uses_with(known)
                graph.erase_node(node)


class Summed:
    """One sum over tokens that `mask` picks; `tokens` and `counts`: what is added up, and what a mean divides by, with
    the sizes of the mask."""

    def __init__(self, node: fx.Node, mask: fx.Node, reduction: str):
        self.node, self.mask, self.reduction = node, mask, reduction
        self.tokens: fx.Node | None = None
        self.counts: fx.Node | None = None
        self.each = 1  # numbers that a token has in a mean

    @classmethod
    def of(cls, node: fx.Node, written: set[Any]) -> Summed | None:
        """The sum that `node` is; None where it is none, or adds up what is not one row for each token of a mask."""
        reduction = reduction_of(node)
        if reduction is None or is_picked(node) or not all(map(is_picked, tensors_of(node))):
            return None
        x, picks = tensors_of(node)[0], picks_of(node)
        masks, rows = {mask_at(pick) for pick in picks}, set(map(count_of, picks))
        first, *others = fake_value(x).shape or [None]
        if any(map(free_unbacked_symbols, others)) or (node.target in BY_CLASS and not others):
            return None
        (mask,) = masks if len(masks) == 1 else (None,)
        if mask is None or memory(mask) in written or is_picked(mask) or first is None or formula(first) not in rows:
            return None
        return cls(node, mask, reduction)

    def put_back(self) -> None:
        """What is picked, in the place of the sum."""
        with self.node.graph.inserting_before(self.node):
            part = self.part()
            self.tokens = self.in_place(part)
            if self.reduction == "mean" and self.node.target in BY_CLASS and is_class(tensors_of(self.node)[1]):
                self.counts = self.in_place(self.weights(fake_value(part).dtype))
            else:
                self.each = prod(map(int, fake_value(part).shape[1:]))

    def add_up(self, place: fx.Node) -> fx.Node:
        """The sum, behind `place`; returns its last node."""
        graph = self.node.graph
        with graph.inserting_after(place):
            end = graph.call_function(operator.pos, (0,))
        with graph.inserting_before(end):
            result = self.emit("sum", self.tokens)
            if self.reduction == "mean":
                count = self.emit("sum", self.counts or self.mask)
                if self.each != 1:
                    count = self.emit(operator.mul, count, self.each)
                result = self.emit(operator.truediv, result, count)
            result = self.emit("to", result, fake_value(self.node).dtype)
        self.node.replace_all_uses_with(result)
        graph.erase_node(end)
        graph.erase_node(self.node)
        return result

    def part(self) -> fx.Node:
        """What is to be added up, of each picked token; 16 bits as float32, in which torch adds them."""
        x = tensors_of(self.node)[0]
        if fake_value(x).dtype in (torch.float16, torch.bfloat16):
            x = self.emit("float", x)
        if self.node.target not in LOSSES:
            return x
        given = {name: value for name, value in bound(self.node).items() if name not in ("size_average", "reduce")}
        return self.emit(self.node.target, **{**given, "input": x, "reduction": "none"})

    def in_place(self, part: fx.Node) -> fx.Node:
        """One number for each token, with the sizes of the mask."""
        if fake_value(part).dim() > 1:
            part = self.emit("sum", self.emit("flatten", part, 1), 1)
        dtype = fake_value(part).dtype
        zeros = self.emit(torch.zeros_like, self.mask, dtype=dtype)
        part = self.emit("to", part, dtype)  # which autocast may change
        return self.emit("index_put", zeros, (self.mask,), part)

    def weights(self, dtype: torch.dtype) -> fx.Node:
        """Of the classes of the picked tokens; 0 where they are ignored."""
        given = bound(self.node)
        target = given["target"]
        kept = self.emit(operator.ne, target, given["ignore_index"])
        counted = self.emit("to", kept, dtype)
        if given["weight"] is None:
            return counted
        within = self.emit("clamp", target, min=0)
        weights = self.emit(operator.getitem, given["weight"], within)
        return self.emit(operator.mul, counted, weights)

    def emit(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        return made_like(self.node, target, *args, **kwargs)
