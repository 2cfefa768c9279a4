"""One step of a loop, as a graph: what the iterations of an unrolled loop have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from ringopt.ir.nodes import is_random, is_tensor, op_name, shape_of, value_of
from ringopt.recognize.scans.buffers import Buffers
from ringopt.recognize.scans.loop import Loop
from ringopt.recognize.scans.operands import (
    Carried,
    Counted,
    Each,
    Operand,
    Outside,
    Own,
    common,
    kind,
    leaves,
    spelled,
    token,
    with_leaves,
)
from ringopt.recognize.scans.periods import FEWEST_STEPS
from ringopt.recognize.scans.recurrence import FoundRecurrence, NotRolled, tidy
from ringopt.recognize.scans.sources import Listed, Source, TensorParts, part_of_split, pieces_of, places_of


@dataclass(frozen=True)
class Rolled:
    """A loop as a recurrence. `carries` and `ys` are the places whose values its outputs are; a place is in both where
    other steps than the last are read too. Below zero, a y is the inverse of a place: its value before the step."""

    loop: Loop
    recurrence: FoundRecurrence
    buffers: Buffers
    carries: Sequence[int]
    ys: Sequence[int]


def rolled(loop: Loop) -> Rolled:
    """Raises NotRolled."""
    try:
        found = Builder(loop).build()
    except OneStepLess:  # the last iteration is only what is behind the loop
        shorter = Loop(loop.iterations[:-1], loop.operands, loop.init).again()
        assert shorter is not None
        found = Builder(shorter).build()
    if all(map(begins_alike, found.recurrence.inputs[0], found.recurrence.init)):
        return found
    later = Loop(found.loop.iterations[1:], loop.operands, loop.init).again()
    if later is None or later.steps < FEWEST_STEPS:
        raise NotRolled("what is carried has another shape after the first step", found.recurrence.like)
    return rolled(later)


def begins_alike(carry: fx.Node, init: fx.Node) -> bool:
    """Whether the first step is given the kind of value that the others are given."""
    return bool(kind(value_of(carry)) == kind(value_of(init)))


class OneStepLess(Exception):
    """A part that the last iteration lacks would lie outside of its tensor."""


def read_outside(loop: Loop) -> dict[int, list[int]]:
    """By place, the iterations whose value something else reads."""
    inside = loop.nodes()
    found: dict[int, list[int]] = {}
    for t, iteration in enumerate(loop.iterations):
        for j, node in enumerate(iteration):
            if node is not None and any(user not in inside for user in node.users):
                found.setdefault(j, []).append(t)
    return found


class Builder:
    """Builds the step of one loop."""

    def __init__(self, loop: Loop):
        self.loop, self.buffers = loop, Buffers.find(loop)
        self.graph = fx.Graph()
        self.made: dict[int, Any] = {}
        self.carries: dict[int, fx.Node] = {}
        self.xs: dict[Source, fx.Node] = {}
        self.consts: dict[fx.Node, fx.Node] = {}
        self.same = self.invariant()

    def build(self) -> Rolled:
        ys, finals = self.results()
        needed = self.needed([*ys, *finals])
        for j in sorted(needed):
            self.made[j] = self.place(j)
        ys = sorted({*ys, *(j for j in finals if j not in self.carries)})
        carries = sorted(self.carries)
        results = [self.carries[~j] if j < 0 else self.made[j] for j in ys]
        self.graph.output((*(self.made[j] for j in carries), *results))
        self.order_inputs(carries)
        tidy(self.graph)
        init = [self.buffers.init.get(j) or self.loop.init[j] for j in carries]
        like = self.loop.first[carries[-1] if carries else 0]
        recurrence = FoundRecurrence(self.graph, init, list(self.xs), list(self.consts), self.loop.steps, like)
        return Rolled(self.loop, recurrence, self.buffers, carries, ys)

    def results(self) -> tuple[list[int], list[int]]:
        """PartPlaces that are read of several steps, and those of which the last value is."""
        ys, finals, last = [], [], self.loop.steps - 1
        for j, read in read_outside(self.loop).items():
            if j in self.same:
                continue
            if j in self.buffers.of:
                if read != [last]:
                    raise NotRolled("a tensor that a loop fills is read half full", self.loop.first[j])
                ys.append(self.buffers.of[j].result)
            elif read == [last] and (j in self.loop.init or j in self.buffers.init):
                finals.append(j)
            else:
                ys.append(j)
        return sorted(set(ys)), finals

    def invariant(self) -> set[int]:
        """PartPlaces that have one value in all iterations."""
        found = set[int]()
        for j, row in enumerate(self.loop.operands):
            fixed = all(isinstance(o, Outside) or (isinstance(o, Own) and o.place in found) for o in row)
            if fixed and not is_random(self.loop.first[j]):
                found.add(j)
        return found

    def needed(self, wanted: Sequence[int]) -> set[int]:
        """PartPlaces that the results are made of; what of them is carried becomes an input."""
        found, stack = set[int](), list(wanted)
        while stack:
            j = stack.pop()
            if j < 0:
                self.carry(j := ~j)
            if j in found or j in self.same:
                continue
            found.add(j)
            for operand in self.operands(j):
                if isinstance(operand, Own):
                    stack.append(operand.place)
                elif isinstance(operand, Carried):
                    stack.append(operand.place)
                    self.carry(operand.place)
        return found

    def operands(self, j: int) -> Sequence[Operand]:
        """Those that are read: of a part of a tensor that the loop fills, what was written there."""
        part = self.buffers.stands_for.get(j)
        if part is None:
            return self.loop.operands[j]
        return [part] if not isinstance(part, TensorParts) else []

    def carry(self, place: int) -> fx.Node:
        if place in self.buffers.of:
            raise NotRolled("a loop reads what it fills, at other places", self.loop.first[place])
        if place in self.same:
            raise NotRolled("what a loop computes is the same in all steps, but for the first", self.loop.first[place])
        if place not in self.carries:
            self.carries[place] = self.input(self.loop.first[place])
        return self.carries[place]

    def input(self, like: fx.Node) -> fx.Node:
        if not is_tensor(like):
            raise NotRolled(f"a value of {op_name(like)} goes from step to step, which is no tensor", like)
        new = self.graph.placeholder(f"in_{len(self.graph.nodes)}")
        new.meta["val"] = value_of(like)
        return new

    def x(self, source: Source, like: fx.Node) -> fx.Node:
        if source not in self.xs:
            self.xs[source] = self.input(like)
        return self.xs[source]

    def const(self, node: fx.Node) -> fx.Node:
        if node not in self.consts:
            self.consts[node] = self.input(node)
        return self.consts[node]

    def place(self, j: int) -> Any:
        """The value of a place, in the step."""
        node, part = self.loop.first[j], self.buffers.stands_for.get(j)
        if isinstance(part, TensorParts):
            return self.x(self.inside(part, node), node)
        if part is not None:
            return self.value(part, node)
        row = self.loop.operands[j]
        if any(isinstance(operand, Counted) for operand in row):
            return self.piece(node, row)
        return self.call(node, [self.value(operand, node) for operand in row])

    def call(self, node: fx.Node, values: Sequence[Any]) -> fx.Node:
        if is_random(node):
            raise NotRolled(f"{op_name(node)} draws random numbers in every step", node)
        args, kwargs = with_leaves(spelled(node), iter(values))
        new = self.graph.call_function(node.target, args, kwargs)
        new.meta = dict(node.meta)
        return new

    def value(self, operand: Operand, reader: fx.Node) -> Any:
        match operand:
            case Outside(fx.Node() as node):
                return self.const(node)
            case Outside(literal):
                return literal
            case Own(place):
                return self.const(self.loop.first[place]) if place in self.same else self.made[place]
            case Carried(place):
                return self.carry(place)
            case Each(values):
                return self.each(values)
        raise NotRolled(f"{op_name(reader)} takes a number that changes from step to step", reader)

    def piece(self, node: fx.Node, row: Sequence[Operand]) -> fx.Node:
        """A part of a tensor from outside."""
        tensor, name = self.outside(row[0]), op_name(node)
        if tensor is None:
            raise NotRolled(f"{name} takes another part in every step, of a value of the loop", node)
        if name == "getitem" and isinstance(row[1], Counted):
            pieces = part_of_split(tensor, row[1])
        else:
            places = places_of(name, row[1:]) if name in ("select", "slice", "narrow") else None
            pieces = TensorParts(tensor, places) if places is not None else None
        if pieces is None:
            raise NotRolled(f"{name} takes numbers that change from step to step", node)
        return self.x(self.inside(pieces, node), node)

    def outside(self, operand: Operand) -> fx.Node | None:
        if isinstance(operand, Own) and operand.place in self.same:
            return self.loop.first[operand.place]
        return operand.value if isinstance(operand, Outside) else None

    def inside(self, pieces: TensorParts, node: fx.Node) -> TensorParts:
        """The pieces, if there is one for every step."""
        if not self.has_all(pieces):
            if None in self.loop.iterations[-1]:
                raise OneStepLess
            raise NotRolled(f"{op_name(node)} takes parts of an axis whose length is open", node)
        return pieces

    def has_all(self, pieces: TensorParts) -> bool:
        """Whether the tensor surely has a piece for every step."""
        return pieces.places.within(shape_of(pieces.tensor)[pieces.places.dim], self.loop.steps)

    def each(self, values: tuple[fx.Node, ...]) -> fx.Node:
        """One of a list, which may itself be made of parts of tensors in one way."""
        pieces = pieces_of(values)
        if pieces is not None:
            return self.x(self.inside(pieces, values[0]), values[0])
        made = self.from_pieces(values)
        return made if made is not None else self.x(Listed(values), values[0])

    def from_pieces(self, values: tuple[fx.Node, ...]) -> fx.Node | None:
        """The op that makes each of a list, in the step; None where that would need another list."""
        if any(value.op != "call_function" or token(value) != token(values[0]) for value in values):
            return None
        rows = [leaves(spelled(value)) for value in values]
        if len({len(row) for row in rows}) != 1 or is_random(values[0]):
            return None
        found, some = [], False
        for column in zip(*rows, strict=True):
            operand = common(column, {})
            if isinstance(operand, Each):
                pieces = pieces_of(operand.values)
                if pieces is None or not self.has_all(pieces):
                    return None
                found.append(self.x(pieces, operand.values[0]))
                some = True
            elif isinstance(operand, Outside) and (not isinstance(operand.value, fx.Node) or is_tensor(operand.value)):
                found.append(self.value(operand, values[0]))
            else:
                return None
        return self.call(values[0], found) if some else None

    def order_inputs(self, carries: Sequence[int]) -> None:
        """As they are passed: carries, xs, consts."""
        order = [*(self.carries[j] for j in carries), *self.xs.values(), *self.consts.values()]
        for node in reversed(order):
            next(iter(self.graph.nodes)).prepend(node)
