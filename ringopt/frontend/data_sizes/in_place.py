"""Attention among tokens that data pick, computed among all of them: those that are not picked are masked.

    rows = nonzero(mask).flatten()                  k = where(mask[:, None], k, 0)
    k, v = cat([a, k[rows]]), cat([b, v[rows]])     k, v = cat([a, k]), cat([b, v])
    y = attention(q, k, v)                    ->    y = attention(q, k, v, attn_mask=cat([ones, mask]))

Every value of an unknown size has the tokens where they were, in their order, with zeros in the places of others. So
all sizes are known, and passes find the attention as any that has a padding mask. What is padded to a known size gets
its tokens moved to the front. Rows of others are never read: they are masked where tokens meet, which is in an
attention alone; operators that could make what is not finite of a row of zeros are left, as is all that has no rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES, PERMUTATIONS, RESHAPES, SLICES
from ringopt.dims.rules import rule_of
from ringopt.dims.searches import is_search
from ringopt.frontend.data_sizes.fake_values import OPEN, fake_value
from ringopt.ir.nodes import (
    arguments_of,
    is_tensor,
    named,
    op_name,
    origin,
    outputs_of,
    shape_of,
    tensor_args,
    value_of,
)
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import same
from ringopt.torch_compat.operators import TO_COPY
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.symbolic_shapes import GuardOnDataDependentSymNode

aten = torch.ops.aten

ATTENTION = "scaled_dot_product_attention"
FINITE = (  # of rows that are finite, with finite gradients
    *RESHAPES, *COPIES, *CASTS, *PERMUTATIONS, "expand", "unsqueeze", "select", "add", "sub", "mul", "neg",
    "relu", "gelu", "silu", "sigmoid", "tanh", "linear", "matmul", "bmm", "mm", "addmm", "layer_norm", "rms_norm",
)  # fmt: skip
DECIDE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}  # what data decide


class NotInPlace(Exception):
    """An operator of the stretch has no such form; its words say which."""


@dataclass(frozen=True)
class Part:
    """`length` places along a dim, all of them tokens, or those where `mask`, a vector, is true. `tokens`: how many,
    which is a symbol there."""

    length: int
    tokens: Any = field(compare=False)
    mask: fx.Node | None = None


Parts = tuple[Part, ...]
States = dict[int, Parts]  # by dim; dims without tokens that were picked have none


def in_place(flat: fx.Graph, given: Sequence[fx.Node], member: fx.Node) -> list[fx.Node] | None:
    """What the stretch `flat`, of which `member` is a node in its graph, makes of the nodes `given`: nodes where that
    graph inserts now. None where nothing attends. Raises NotInPlace."""
    if not any(op_name(node) == ATTENTION for node in flat.nodes):
        return None
    run = InPlace(member, given)
    for node in flat.nodes:
        try:
            run.add(node)
        except (NotInPlace, GuardOnDataDependentSymNode) as problem:
            raise NotInPlace(f"{op_name(node)} is not known to do the same where tokens are masked") from problem
    return [run.values[result] for result in outputs_of(flat)]


class InPlace:
    """Of each node of a flat graph the value in the other graph, and which of its dims have picked tokens."""

    def __init__(self, member: fx.Node, given: Sequence[fx.Node]) -> None:
        self.member, self.given = member, list(given)
        self.mode = fake_value(given[0]).fake_mode
        self.values: dict[fx.Node, Any] = {}
        self.states: dict[fx.Node, States] = {}
        self.masks: dict[fx.Node, fx.Node] = {}  # of vectors of numbers of tokens, or columns of such
        self.pieces: dict[fx.Node, list[tuple[fx.Node, States]]] = {}  # of what gives several
        self.counts: set[fx.Node] = set()  # numbers that follow from how many tokens there are

    def add(self, node: fx.Node) -> None:
        """Raises NotInPlace."""
        self.states[node] = {}
        if node.op == "placeholder":
            self.values[node] = self.given[len(self.values)]
        elif node.op == "call_function":
            getattr(self, f"of_{op_name(node)}", self.of_others)(node)
            self.check(node)
        elif node.op != "output" or any(result.op == "placeholder" for result in node.all_input_nodes):
            raise NotInPlace

    def check(self, node: fx.Node) -> None:
        """Dims of a size that is not known are those of picked tokens, and all others are as they were."""
        if is_tensor(node) and node not in self.masks:
            sizes = [None if isinstance(size, OPEN) else size for size in shape_of(node)]
            if sizes != [None if dim in self.states[node] else self.size(node, dim) for dim in range(len(sizes))]:
                raise NotInPlace

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Raises NotInPlace for what gives numbers or sizes of its own, and where other sizes do not fit."""
        values, others = fx.map_arg((args, kwargs), fake_value)
        if DECIDE & set(getattr(target, "tags", ())):
            raise NotInPlace
        try:
            with self.mode:
                value = target(*values, **others)
        except RuntimeError as error:
            raise NotInPlace from error
        made = self.member.graph.call_function(target, args, kwargs)
        made.meta.update(origin(self.member), example_value=value)
        return made

    def spread(self, mask: fx.Node, dim: int, rank: int) -> fx.Node:
        """The mask along a dim, to be broadcast to a value of `rank` dims."""
        return self.emit(aten.view.default, mask, [-1 if at == dim else 1 for at in range(rank)])

    def mask_of(self, parts: Parts) -> fx.Node:
        """Which of the places are tokens."""
        device = fake_value(next(part.mask for part in parts if part.mask is not None)).device
        found = [
            part.mask
            if part.mask is not None
            else self.emit(aten.ones.default, [part.length], dtype=torch.bool, device=device)
            for part in parts
        ]
        return found[0] if len(found) == 1 else self.emit(aten.cat.default, found)

    # ---- numbers of tokens -------------------------------------------------------------------------------------------
    def search(self, node: fx.Node) -> None:
        mask = node.args[0]
        if not is_search(node) or len(shape_of(mask)) != 1 or self.states[mask] or mask in self.masks:
            raise NotInPlace
        seen = self.values[mask]
        self.masks[node] = seen if fake_value(seen).dtype == torch.bool else self.emit(aten.ne.Scalar, seen, 0)

    of_nonzero = of_nonzero_numpy = search

    def of_where(self, node: fx.Node) -> None:
        (self.search if is_search(node) else self.of_others)(node)

    def of_sym_size(self, node: fx.Node) -> None:
        x, dim = node.args[:2]
        if x in self.masks or dim in self.states[x]:
            self.counts.add(node)
        self.values[node] = int(fake_value(self.masks[x]).shape[0]) if x in self.masks else self.size(x, dim)

    def vector(self, node: fx.Node) -> None:
        """The only column of what `nonzero` gives, or the only element of what `where` gives; all of it."""
        x = node.args[0]
        if op_name(node) not in (*RESHAPES, *SLICES, "getitem", "select") or not shape_of(node):
            raise NotInPlace
        all_of_it = op_name(node) == "getitem" or same(shape_of(node)[0], shape_of(x)[0])
        if not all_of_it or not isinstance(shape_of(node)[0], OPEN) or shape_of(node)[1:] not in ((), (1,)):
            raise NotInPlace
        self.masks[node] = self.masks[x]

    # ---- picked, and put back ----------------------------------------------------------------------------------------
    def place_of(self, x: fx.Node, at: Sequence[fx.Node | None]) -> tuple[int, fx.Node]:
        """The dim of `x` along which one index picks tokens, and the mask."""
        places = [dim for dim, index in enumerate(at) if index is not None]
        index = at[places[0]] if len(places) == 1 else None
        if index is None or len(shape_of(index)) != 1 or self.states[index]:
            raise NotInPlace
        dim, mask = places[0], self.masks.get(index)
        if value_of(index).dtype == torch.bool:
            mask = self.values[index]
        if mask is None or dim in self.states[x] or self.size(x, dim) != fake_value(mask).shape[0]:
            raise NotInPlace
        return dim, mask

    def size(self, x: fx.Node, dim: int) -> int:
        return int(fake_value(self.values[x]).shape[dim])

    def picks(self, node: fx.Node, x: fx.Node, dim: int, mask: fx.Node) -> None:
        """Zeros in the places of others: they may be anything, such as NaN."""
        seen, rank = self.values[x], len(shape_of(x))
        zero = self.emit(aten.zeros.default, [], dtype=fake_value(seen).dtype, device=fake_value(seen).device)
        self.values[node] = self.emit(aten.where.self, self.spread(mask, dim, rank), seen, zero)
        self.states[node] = {**self.states[x], dim: (Part(self.size(x, dim), shape_of(node)[dim], mask),)}

    def of_index(self, node: fx.Node) -> None:
        x, at = node.args
        self.picks(node, x, *self.place_of(x, at))

    def of_index_select(self, node: fx.Node) -> None:
        x, dim, index = node.args
        self.picks(node, x, *self.place_of(x, [None] * (dim % len(shape_of(x))) + [index]))

    def puts(self, node: fx.Node, dim: int, mask: fx.Node, values: fx.Node, adds: bool) -> None:
        """Tokens written, or added, to where they were among all."""
        x, picked = node.args[0], (Part(self.size(node.args[0], dim), None, mask),)
        rank = len(shape_of(x))
        at = dim - rank + len(shape_of(values))  # values may lack the first dims
        if self.states[x] or self.states[values] != {at: picked}:
            raise NotInPlace
        into, new = self.values[x], self.values[values]
        new = self.emit(aten.add.Tensor, into, new) if adds else new
        self.values[node] = self.emit(aten.where.self, self.spread(mask, dim, rank), new, into)

    def of_index_put(self, node: fx.Node) -> None:
        x, at, values = node.args[:3]
        self.puts(node, *self.place_of(x, at), values, adds=len(node.args) > 3 and bool(node.args[3]))

    def of_index_add(self, node: fx.Node) -> None:
        x, dim, index, values = node.args[:4]
        if arguments_of(node)["alpha"] != 1:
            raise NotInPlace
        at = [None] * (dim % len(shape_of(x))) + [index]
        self.puts(node, *self.place_of(x, at), values, adds=True)

    def of_index_copy(self, node: fx.Node) -> None:
        x, dim, index, values = node.args
        self.puts(node, *self.place_of(x, [None] * (dim % len(shape_of(x))) + [index]), values, adds=False)

    # ---- where tokens meet -------------------------------------------------------------------------------------------
    def of_cat(self, node: fx.Node) -> None:
        xs, dim = list(node.args[0]), (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
        if any(set(self.states[x]) - {dim} or x in self.masks for x in xs):
            raise NotInPlace
        self.values[node] = self.emit(aten.cat.default, [self.values[x] for x in xs], dim)
        if any(self.states[x] for x in xs):
            self.states[node] = {dim: tuple(part for x in xs for part in self.parts_of(x, dim))}

    def parts_of(self, x: fx.Node, dim: int) -> Parts:
        return self.states[x].get(dim, (Part(self.size(x, dim), self.size(x, dim)),))

    def cut(self, x: fx.Node, dim: int, start: Any, end: Any) -> tuple[fx.Node, States]:
        """The tokens from `start` to `end`, as the program counts them: parts, none of them in two."""
        parts, others = self.parts_of(x, dim), {at: parts for at, parts in self.states[x].items() if at != dim}
        if dim not in self.states[x]:
            return self.emit(aten.slice.Tensor, self.values[x], dim, int(start), int(end)), others
        edges = list(accumulate((part.tokens for part in parts), initial=0))
        first, last = ([at for at, edge in enumerate(edges) if same(edge, number)] for number in (start, end))
        if not first or not last or first[0] >= last[0]:
            raise NotInPlace
        kept, before = parts[first[0] : last[0]], sum(part.length for part in parts[: first[0]])
        value = self.emit(aten.slice.Tensor, self.values[x], dim, before, before + sum(part.length for part in kept))
        return value, {**others, dim: kept} if any(part.mask is not None for part in kept) else others

    def of_slice(self, node: fx.Node) -> None:
        given = arguments_of(node)
        x, dim = given["self"], given["dim"] % len(shape_of(node))
        if x in self.masks:
            return self.vector(node)
        ends = [value_of(at) if isinstance(at, fx.Node) else at for at in (given["start"] or 0, given["end"])]
        whole = shape_of(x)[dim]
        ends = [whole if at is None or same(at, sys.maxsize) else at + whole if at < 0 else at for at in ends]
        if given["step"] != 1 or (dim not in self.states[x] and any(isinstance(at, OPEN) for at in ends)):
            raise NotInPlace
        self.values[node], self.states[node] = self.cut(x, dim, *ends)
        return None

    def split(self, node: fx.Node) -> None:
        x, dim = node.args[0], named(node, "dim") % len(shape_of(node.args[0]))
        edges = list(accumulate((piece.shape[dim] for piece in value_of(node)), initial=0))
        self.pieces[node] = [self.cut(x, dim, start, end) for start, end in pairwise(edges)]

    of_split = of_split_with_sizes = of_chunk = of_tensor_split = split

    def of_getitem(self, node: fx.Node) -> None:
        if node.args[0] not in self.pieces:
            return self.of_others(node)
        self.values[node], self.states[node] = self.pieces[node.args[0]][node.args[1]]
        return None

    def of_scaled_dot_product_attention(self, node: fx.Node) -> None:
        given = arguments_of(node)
        q, k, v = given["query"], given["key"], given["value"]
        dim = len(shape_of(q)) - 2
        queries, keys = self.states[q].get(dim), self.states[k].get(dim)
        alike = self.states[k] == self.states[v] == {dim: keys} and not set(self.states[q]) - {dim}
        if keys is None or not alike or given["attn_mask"] is not None or given["dropout_p"]:
            raise NotInPlace
        if isinstance(given["scale"], fx.Node):  # a number that may follow from how many tokens there are
            raise NotInPlace
        seen = self.emit(aten.unsqueeze.default, self.mask_of(keys), 0)
        if given["is_causal"]:  # the order is what it was
            if queries != keys:
                raise NotInPlace
            square = [self.size(k, dim)] * 2
            before = self.emit(aten.ones.default, square, dtype=torch.bool, device=fake_value(seen).device)
            seen = self.emit(aten.logical_and.default, self.emit(aten.tril.default, before), seen)
        others = {name: given[name] for name in ("scale", "enable_gqa") if name in given}
        values = [self.values[x] for x in (q, k, v)]
        self.values[node] = self.emit(aten.scaled_dot_product_attention.default, *values, seen, **others)
        self.states[node] = {} if queries is None else {dim: queries}

    # ---- sizes that are known again ----------------------------------------------------------------------------------
    def of_pad(self, node: fx.Node) -> None:
        """Tokens come to the front of the part that they are picked from, which is the last."""
        given = arguments_of(node)
        x, pads, size = given["self"], list(given["pad"]), None
        ends = [place for place, pad in enumerate(pads) if pad in self.counts or pad != 0]
        if len(ends) == 1 and ends[0] % 2:
            dim = len(shape_of(x)) - 1 - ends[0] // 2
            size = shape_of(node)[dim]
        if not isinstance(size, int) or set(self.states[x]) != {dim} or given.get("mode", "constant") != "constant":
            raise NotInPlace
        *firsts, last = self.states[x][dim]
        if last.mask is None or any(part.mask is not None for part in firsts):
            raise NotInPlace
        value, before = given.get("value") or 0.0, sum(part.length for part in firsts)
        seen = self.to_front(self.values[x], dim, before, last, value)
        pads = [size - before - last.length if place == ends[0] else 0 for place in range(len(pads))]
        self.values[node] = self.emit(aten.constant_pad_nd.default, seen, pads, value)

    of_constant_pad_nd = of_pad

    def to_front(self, x: fx.Node, dim: int, before: int, part: Part, filler: float) -> fx.Node:
        """`x` with the tokens of a part, which begins at `before` and ends with the dim, first in it."""
        value, mask = fake_value(x), part.mask
        fill = self.emit(aten.full.default, [], filler, dtype=value.dtype, device=value.device)
        own = self.emit(aten.slice.Tensor, x, dim, before, before + part.length)
        own = self.emit(aten.where.self, self.spread(mask, dim, value.dim()), own, fill)
        others = self.emit(TO_COPY, self.emit(aten.logical_not.default, mask), dtype=torch.uint8)
        own = self.emit(aten.index_select.default, own, dim, self.emit(aten.argsort.stable, others, stable=True))
        firsts = [self.emit(aten.slice.Tensor, x, dim, 0, before)] if before else []
        return self.emit(aten.cat.default, [*firsts, own], dim)

    # ---- token by token ----------------------------------------------------------------------------------------------
    def of_others(self, node: fx.Node) -> None:
        """By the rule of the operator."""
        if any(x in self.masks for x in node.all_input_nodes):
            return self.vector(node)
        if any(x in self.counts for x in node.all_input_nodes):
            if is_tensor(node) and op_name(node) not in (*RESHAPES, "expand"):
                raise NotInPlace
            self.counts.add(node)
        if any(self.states[x] for x in node.all_input_nodes):
            if op_name(node) not in FINITE or arguments_of(node).get("eps") == 0:
                raise NotInPlace
            self.states[node] = self.by_rule(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        numbers = not any(isinstance(x, fx.Node) for x in tree_leaves((args, kwargs)))
        self.values[node] = node.target(*args, **kwargs) if numbers else self.emit(node.target, *args, **kwargs)
        return None

    def by_rule(self, node: fx.Node) -> States:
        rule, operands = rule_of(node), list(tensor_args(node))
        if rule is None or len(rule.operands) != len(operands):
            raise NotInPlace
        found: States = {}
        for place, x in enumerate(operands):
            for dim, parts in self.states[x].items():
                out = rule.push(place, Sharded(dim, 1, shape_of(x)[dim], 1))
                wanted = rule.pull(out) if out is not None else None
                if out is None or wanted is None:
                    raise NotInPlace
                if any(at and self.states[y].get(at.dim) != parts for y, at in zip(operands, wanted, strict=True)):
                    raise NotInPlace
                found[out.dim] = parts
        return found
