"""Builds the sharded graph beside the original one, node by node.

Every value of the original graph is replicated, or sharded by one `Sharded` placement. Conversions sit on edges and are
made once: the same value may be wanted replicated by one reader and sharded by another.

A replicated value that is wanted sharded is not computed whole and then cut: the demand climbs through token-wise
producers, by the same table that pushes placements forward, to inputs, `arange` and whatever mixes rows. So position
ids, rope tables and shifted labels need no code of their own; the replicated originals die as dead code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.dims.contraction_rules import is_batched_product
from ringopt.dims.declared import DeclaredRule, why_whole
from ringopt.dims.rule import Rule, ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.memory import laying_out, viewed
from ringopt.ir.nodes import (
    eliminate_dead_code,
    is_aten,
    is_tensor,
    module_path,
    named,
    op_name,
    origin,
    requires_grad,
    shape_of,
    tensor_args,
    value_of,
)
from ringopt.ir.notes import NAMED, PLACEMENT, WHOLE
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import at_hand, elements, is_open, same
from ringopt.ops import operators
from ringopt.rules.declare import is_foreign, line_to_write
from ringopt.sharding.ranks import Ranks
from ringopt.sharding.row_counts import RowCounts
from ringopt.torch_compat.operators import UNSAFE_VIEW
from ringopt.torch_compat.schema import schema_of

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherNote:
    """The rows of `value` were needed whole by `reader`."""

    value: fx.Node
    reader: fx.Node
    bytes: int


class Sharder:
    """Of `graph`, over `ranks`, of which this is one."""

    def __init__(self, graph: fx.Graph, ranks: Ranks):
        self.ranks = ranks
        self.graph = fx.Graph()
        self.carries = requires_grad(graph)
        self.rows = RowCounts(self.graph, ranks, any(map(is_batched_product, graph.nodes)))
        self.values: dict[fx.Node, fx.Node] = {}
        self.placements: dict[fx.Node, Sharded | None] = {}
        self.converted: dict[tuple[fx.Node, object], fx.Node] = {}
        self.gathers: list[GatherNote] = []
        # Of some values the rows are made in a way of their own; None where that is worse than to cut the whole.
        self.climbers: dict[fx.Node, Callable[[Sharded], fx.Node | None]] = {}
        self.climbs = True
        # How to spread, as soon as they are there, values that nobody demands by a rule
        # (ringopt/sharding/handlers/demands.py).
        self.sources: dict[fx.Node, Sharded] = {}
        self.begun = set[fx.Node]()  # those of them that were: what they were cut from is there, to be dropped
        # Those of them that are not made whole for whoever reads all of them, but gathered; and of products of pairs
        # the operand that gives them their rows (ringopt/sharding/handlers/pairs.py).
        self.in_parts = set[fx.Node]()
        self.leading: dict[fx.Node, fx.Node] = {}
        # How nodes are placed that the handler of an earlier one has understood
        # (ringopt/sharding/handlers/moe_routing.py).
        self.understood: dict[fx.Node, Callable[[], None]] = {}
        self.relaid: list[str] = []  # sequences that change their layout on the way, for the report
        self.reader: fx.Node | None = None

    # ---- what the walk calls ---------------------------------------------------------------------------------------
    def keep(self, node: fx.Node) -> None:
        """An input, a constant: replicated as it is."""
        self.set(node, self.graph.node_copy(node, lambda arg: self.values[arg]), None)

    def begin(self, node: fx.Node) -> None:
        """A replicated value is sharded from here on; whoever reads it whole has it as it was, if it is not made in
        parts."""
        whole, placement = self.values[node], self.sources[node]
        if node in self.in_parts and self.reach(node, placement) is None:
            return
        self.reader = node
        rows = self.sharded(node, placement)
        if node not in self.in_parts:
            self.converted[node, "whole"] = whole
            self.begun.add(node)
        self.set(node, rows, placement)

    def hold(self, node: fx.Node, placement: Sharded) -> None:
        """An input of which this rank is given its rows."""
        self.set(node, self.graph.node_copy(node), placement)
        value, size = value_of(node), list(shape_of(node))
        rows = self.ranks.rows_here(placement.length, self.ranks.layout(placement.length))
        size[placement.dim] = placement.outer * rows * placement.inner
        self.values[node].meta["val"] = value.new_empty(size).requires_grad_(value.requires_grad)

    def whole(self, node: fx.Node) -> None:
        """The op as it was, on whole operands: always right."""
        self.reader = node
        made = self.graph.node_copy(node, self.replicated)
        if node.target in (aten.view.default, UNSAFE_VIEW):
            made.target = aten.reshape.default  # what was gathered has other strides, of which there may be no view
        self.set(node, made, None)

    def along(self, node: fx.Node) -> bool:
        """By the table of rules, when some operand is sharded: as the largest one. False where it has no answer."""
        operands = list(tensor_args(node))
        at = [(i, place) for i, arg in enumerate(operands) if (place := self.placements.get(arg)) is not None]
        rule = rule_of(node) if at else None
        if rule is None or len(rule.operands) != len(operands):
            return False
        self.reader = node
        first = self.leading.get(node)
        order = [(x is not first, -len(shape_of(x)), -elements(shape_of(x))) for x in operands]
        for i, place in sorted(at, key=lambda found: order[found[0]]):
            out = rule.push(i, place)
            wanted = rule.pull(out) if out is not None else None
            if out is not None and wanted is not None and self.consistent(rule, wanted, out):
                self.set(node, self.emit(node, rule, wanted, out), out)
                return True
        return False

    def adopt(self, node: fx.Node, like: fx.Node) -> None:
        """A node that is new in the original graph: what `like` does is done in parts."""
        node.meta.update(origin(like))
        self.carries[node] = any(self.carries[arg] for arg in node.all_input_nodes)

    def set(self, node: fx.Node, value: fx.Node, placement: Sharded | None) -> None:
        if placement is not None and value_of(node) is not None:
            assert same(shape_of(node)[placement.dim], placement.size), (node, shape_of(node), placement)
        self.values[node], self.placements[node] = value, placement
        value.meta[PLACEMENT] = placement
        value.meta[WHOLE] = value_of(node)

    # ---- conversions -----------------------------------------------------------------------------------------------
    def replicated(self, node: fx.Node) -> fx.Node:
        """The whole value on every rank."""
        placement = self.placements[node]
        if placement is None:
            return self.values[node]
        return self.once(node, "whole", lambda: self.gather(node, placement))

    def as_view(self, node: fx.Node, base: fx.Node) -> fx.Node:
        """The whole value as a view of the whole `base`, with the strides that the program gave that."""
        return self.once(node, "view", lambda: self.based(base) if node is base else self.viewed(node, base))

    def based(self, node: fx.Node) -> fx.Node:
        whole = self.replicated(node)
        if self.placements[node] is None:
            return whole
        for target, args in laying_out(value_of(node).stride()):
            whole = self.call(target, (whole, *args), node, None)
            whole.meta[WHOLE] = None
        return whole

    def viewed(self, node: fx.Node, base: fx.Node) -> fx.Node:
        parent = viewed(node)
        assert parent is not None
        made = self.graph.node_copy(node, lambda x: self.as_view(x, base) if x is parent else self.replicated(x))
        made.meta[PLACEMENT], made.meta[WHOLE] = None, value_of(node)
        return made

    def gather(self, node: fx.Node, placement: Sharded) -> fx.Node:
        value = value_of(node)
        assert self.reader is not None
        self.gathers.append(GatherNote(node, self.reader, at_hand(value.numel()) * value.element_size()))
        given = {"x": self.values[node], **self.factors(placement), "layout": self.ranks.layout(placement.length)}
        return self.over_ranks(operators.gather.default, node, None, "whole", **given)

    def copied(self, node: fx.Node) -> fx.Node:
        """The whole value, used beside sharded ones: each rank's gradient of it is a part, so they are summed."""
        whole = self.replicated(node)
        if not self.carries[node]:
            return whole
        target = operators.copy_to_group.default
        return self.once(node, "copied", lambda: self.over_ranks(target, node, None, "copied", x=whole))

    def sharded(self, node: fx.Node, placement: Sharded) -> fx.Node:
        """This rank's rows of the value."""
        if self.placements[node] == placement:
            return self.values[node]
        made = (self.climb, self.respread, self.scatter) if self.climbs else (self.scatter,)
        return self.once(node, placement, lambda: next(filter(None, (make(node, placement) for make in made))))

    def respread(self, node: fx.Node, placement: Sharded) -> fx.Node | None:
        """From the sequence along which the value is sharded to another that the same dim is made of, or to another
        dim; None where sizes are open, or it is too short."""
        held = self.placements[node]
        if held is None or (self.ranks.asks and held.dim != placement.dim):
            return None
        if held.dim != placement.dim:
            fits = not is_open(placement.length) and placement.length >= self.ranks.least(placement.length)
            return self.turn(node, held, placement) if fits and not self.is_whole(node) else None
        if self.ranks.same_rows(held, placement):
            return self.values[node]
        old, new = ((place.outer, place.length, place.inner) for place in (held, placement))
        if self.ranks.asks or any(map(is_open, (*old, *new))) or placement.length < self.ranks.least(placement.length):
            return None
        given = {"x": self.values[node], "dim": held.dim, "old": old, "new": new, **self.from_to(held, placement)}
        return self.over_ranks(operators.respread.default, node, placement, "respread", **given)

    def from_to(self, held: Sharded, placement: Sharded) -> dict[str, Any]:
        """Arguments of operators that lay rows out anew: the layouts, and what a rank has of the new one."""
        old, new = held.length, placement.length
        return {"local": self.rows(new), "old_layout": self.ranks.layout(old), "new_layout": self.ranks.layout(new)}

    def is_whole(self, node: fx.Node) -> bool:
        """Whether a sharded value has been gathered for another reader."""
        return (node, "whole") in self.converted and node not in self.begun

    def turn(self, node: fx.Node, held: Sharded, placement: Sharded, rows: fx.Node | None = None) -> fx.Node:
        """All of the dim along which the value, or what is given of it, is sharded, and this rank's part of another."""
        old, new = ((place.outer, place.length, place.inner) for place in (held, placement))
        given = {"x": rows or self.values[node], "dim": held.dim, "old": old, "new_dim": placement.dim, "new": new}
        given |= self.from_to(held, placement)
        return self.over_ranks(operators.turn.default, node, placement, "turned", **given)

    def scatter(self, node: fx.Node, placement: Sharded) -> fx.Node:
        cut = self.cut(placement)
        return self.over_ranks(operators.scatter.default, node, placement, "rows", x=self.replicated(node), **cut)

    def climb(self, node: fx.Node, placement: Sharded) -> fx.Node | None:
        """Computes only this rank's rows, from rows of the operands."""
        if node in self.climbers:
            return self.climbers[node](placement)
        reached = self.reach(node, placement)
        return self.emit(node, *reached, placement) if reached is not None else None

    def reach(self, node: fx.Node, placement: Sharded) -> tuple[Rule, list[Sharded | None]] | None:
        """How a demand for rows of a replicated value climbs over its producer; None where the producer mixes rows or
        moving the demand up would cost a gather."""
        rule = rule_of(node) if self.placements[node] is None else None
        operands = list(tensor_args(node))
        wanted = rule.pull(placement) if rule is not None and len(rule.operands) == len(operands) else None
        if rule is None or wanted is None or not self.consistent(rule, wanted, placement):
            return None
        if any(operand not in self.placements for operand in operands):
            return None  # a tuple whose elements were placed by themselves
        for operand, place in zip(operands, wanted, strict=True):
            if self.placements[operand] is not None and self.placements[operand] != place:
                return None
            if place is None or is_tensor(operand) or self.placements[operand] == place:
                continue
            if self.reach(operand, place) is None:
                return None  # the outputs of a split cannot be scattered
        return rule, wanted

    def operand(self, node: fx.Node, wanted: Sharded | None) -> fx.Node:
        return self.copied(node) if wanted is None else self.sharded(node, wanted)

    def once(self, node: fx.Node, form: object, make: Callable[[], fx.Node]) -> fx.Node:
        key = (node, form)
        if key not in self.converted:
            self.converted[key] = make()
        return self.converted[key]

    # ---- emission --------------------------------------------------------------------------------------------------
    def consistent(self, rule: Rule, wanted: Sequence[Sharded | None], out: Sharded) -> bool:
        return all(place is None or rule.push(i, place) == out for i, place in enumerate(wanted))

    def emit(self, node: fx.Node, rule: Rule, wanted: Sequence[Sharded | None], out: Sharded) -> fx.Node:
        """`node` on local operands. Sizes given as arguments lose the sharded one: it is whatever is here."""
        target, args, kwargs = on_rows(node, rule, out, *self.operands(node, wanted))
        return self.call(target, args, node, out, kwargs)

    def operands(self, node: fx.Node, wanted: Sequence[Sharded | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `node`, its tensors in the wanted placements, in the order of `tensor_args`."""
        places, tensors = iter(wanted), set(tensor_args(node))
        new = fx.map_arg(
            (node.args, node.kwargs),
            lambda arg: self.operand(arg, next(places)) if arg in tensors else self.values[arg],
        )
        return new[0], new[1]

    def call(
        self,
        target: Any,
        args: Sequence[Any],
        like: fx.Node,
        placement: Sharded | None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> fx.Node:
        """A node that is the value of `like` in some form. It takes over the name, so that a diff shows what
        changed."""
        new = self.graph.create_node("call_function", target, tuple(args), kwargs or {}, name or like.name)
        new.meta = origin(like)
        new.meta[PLACEMENT], new.meta[WHOLE], new.meta[NAMED] = placement, value_of(like), name or like.name
        return new

    def over_ranks(
        self, target: Any, like: fx.Node, placement: Sharded | None, suffix: str = "", **arguments: Any
    ) -> fx.Node:
        """An operator of ringopt, by the names of its arguments but its group: the value of `like` in another form."""
        call = OpCall.to(target, **arguments, group=self.ranks.group)
        return self.call(target, call.args, like, placement, name=f"{like.name}_{suffix}" if suffix else None)

    def step(self, target: Any, *args: Any, like: fx.Node, placement: Sharded | None = None, **kwargs: Any) -> fx.Node:
        """A node on the way to the value of `like`, of a shape of its own."""
        name = f"{like.name}_{schema_of(target).name.split('::')[1]}"
        new = self.call(target, args, like, placement, kwargs, name=name)
        new.meta[WHOLE] = None
        return new

    def finished(self) -> fx.Graph:
        """The sharded graph without dead code. The replicated originals being gone, their names are free again."""
        eliminate_dead_code(self.graph)
        clean, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: new[arg])
            new[node] = clean.create_node(node.op, node.target, args, kwargs, node.meta.pop(NAMED, node.name))
            new[node].meta = node.meta
        return clean

    def factors(self, placement: Sharded) -> dict[str, Any]:
        """Arguments of operators on rows: where these are."""
        return {name: getattr(placement, name) for name in ("dim", "outer", "length", "inner")}

    def cut(self, placement: Sharded) -> dict[str, Any]:
        """And what a rank has of them."""
        length = placement.length
        return {**self.factors(placement), "local": self.rows(length), "layout": self.ranks.layout(length)}

    def describe(self, note: GatherNote) -> str:
        placement = self.placements[note.value]
        reader = (
            "an output of the graph" if note.reader.op == "output" else f"{op_name(note.reader) or note.reader.target}"
        )
        where = module_path(note.reader)
        what = f"{reader}{' in ' + where if where else ''} needs all rows of {note.value.name}, sharded {placement}"
        return f"{what}{about_rule(note.reader, placement)}"


def about_rule(reader: fx.Node, placement: Sharded | None) -> str:
    """Of an operator of another library: why its rule does not help, or the line of code that would."""
    if not is_foreign(reader):
        return ""
    if why := why_whole(reader):
        return f": {why}"
    line = line_to_write(reader, placement.dim if placement is not None else 1)
    return f": it has no rule. If it works token by token, {line} keeps it on shards"


def on_rows(
    node: fx.Node, rule: Rule, out: Sharded, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call of `node` on rows, from its arguments: sizes given as arguments lose the sharded one, which is whatever
    is here."""
    sizes = [-1 if dim == out.dim else size for dim, size in enumerate(shape_of(node))] if is_tensor(node) else []
    if isinstance(rule, DeclaredRule):
        return rule.local or node.target, args, kwargs
    if isinstance(rule, ViewRule):
        return aten.reshape.default, (args[0], sizes), {}
    if is_aten(node) and op_name(node) in ("expand", "broadcast_to"):
        return node.target, (args[0], sizes), kwargs
    if op_name(node) in ("slice", "narrow") and named(node, "dim") % len(shape_of(node)) == out.dim:
        # The rule says that it takes all: what is here is less than what it counts.
        return aten.slice.Tensor, (args[0], out.dim, 0, sys.maxsize), {}
    return node.target, args, kwargs
