"""A loop that was unrolled: its iterations, and what the operands of each place of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.ir.nodes import value_of
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.recognize.scans.operands import (
    Carried,
    Counted,
    Each,
    Operand,
    Outside,
    Own,
    common,
    equal,
    kind,
    leaves,
    spelled,
    token,
)
from ringopt.recognize.scans.periods import FEWEST_STEPS, Repeat

Iteration = list["fx.Node | None"]

# An iteration may begin at any of its places; so many are tried, those that carry least first.
MOST_PHASES = 16


@dataclass(frozen=True)
class Loop:
    """`iterations[t][j]` is the node at place j of iteration t, None where the last one lacks it; `operands[j]` are
    those of place j, in the order of `leaves`; `init[j]` is what the first iteration reads in the place of j."""

    iterations: list[Iteration]
    operands: list[list[Operand]]
    init: dict[int, fx.Node]

    @property
    def steps(self) -> int:
        return len(self.iterations)

    @property
    def first(self) -> list[fx.Node]:
        """The first iteration, which lacks nothing."""
        return [node for node in self.iterations[0] if node is not None]

    def column(self, place: int) -> Iteration:
        return [iteration[place] for iteration in self.iterations]

    def nodes(self) -> set[fx.Node]:
        return {node for iteration in self.iterations for node in iteration if node is not None}

    def again(self) -> Loop | None:
        """The same of the graph as it is now: what the nodes are made of may have been rewritten."""
        whole = [iteration for iteration in self.iterations if None not in iteration]
        found = _loop_of([[node for node in each if node is not None] for each in whole])
        if found is not None and len(whole) < self.steps:
            _take_last(found, [node for node in self.iterations[-1] if node is not None])
        return found


def loop_in(calls: Sequence[fx.Node], stretch: Repeat) -> Loop | None:
    """The loop that a stretch of a graph is, the border of its iterations where least is carried over it. Its first
    iteration may do something else with the same ops, and so may its last."""
    later = Repeat(stretch.start + stretch.period, stretch.end, stretch.period)
    for part in (stretch, later):
        for start in phases(calls, part)[:MOST_PHASES]:
            found = _loop_at(calls, start, part)
            if found is not None and found.steps >= FEWEST_STEPS:
                return found
    return None


def _loop_at(calls: Sequence[fx.Node], start: int, stretch: Repeat) -> Loop | None:
    """The loop whose first iteration begins at `start`."""
    period = stretch.period
    whole = [list(calls[at : at + period]) for at in range(start, stretch.end - period + 1, period)]
    if len(whole) < 2 or _loop_of(whole[:FEWEST_STEPS]) is None:  # most are refused by the first few
        return None
    found = _loop_of(whole) or _loop_of(whole[:-1])
    if found is not None and found.steps == len(whole):
        behind = start + len(whole) * period
        _take_last(found, calls[behind : behind + period])
    return found


def phases(calls: Sequence[fx.Node], stretch: Repeat) -> list[int]:
    """Where the first iteration may begin: where most iterations are, and of these where least is carried."""
    carried, period = bytes_over_borders(calls, stretch), stretch.period
    many = [-(-(stretch.end - stretch.start - r) // period) for r in range(period)]
    order = sorted(range(period), key=lambda r: (-many[r], carried[r], r))
    return [stretch.start + r for r in order]


def bytes_over_borders(calls: Sequence[fx.Node], stretch: Repeat) -> list[int]:
    """By phase, the bytes of values of one iteration that are read in the next, were its border there."""
    start, period = stretch.start, stretch.period
    at = {node: i for i, node in enumerate(calls[start : start + 2 * period], start)}
    last_read: dict[fx.Node, int] = {}
    for i in range(start + period, min(start + 2 * period, stretch.end)):
        for operand in calls[i].all_input_nodes:
            if operand in at:
                last_read[operand] = i
    change = [0] * (period + 1)
    for node, read in last_read.items():
        size = _bytes(value_of(node))
        for border in range(at[node] + 1, min(read, at[node] + period) + 1):
            change[(border - start) % period] += size
    return change[:period]


def _bytes(value: object) -> int:
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    return at_hand(value.numel()) * value.element_size() if isinstance(value, torch.Tensor) else 0


def _loop_of(iterations: list[list[fx.Node]]) -> Loop | None:
    """Of whole iterations; None where operands do not follow one rule."""
    at = {node: (t, j) for t, iteration in enumerate(iterations) for j, node in enumerate(iteration)}
    operands: list[list[Operand]] = []
    init: dict[int, fx.Node] = {}
    for j in range(len(iterations[0])):
        rows = [leaves(spelled(iteration[j])) for iteration in iterations]
        if len({len(row) for row in rows}) != 1:
            return None
        found = []
        for values in zip(*rows, strict=True):
            operand = common(values, at)
            if operand is None:
                return None
            if isinstance(operand, Carried) and init.setdefault(operand.place, values[0]) is not values[0]:
                return None
            found.append(operand)
        operands.append(found)
    return Loop([list(iteration) for iteration in iterations], operands, init)


def _take_last(loop: Loop, behind: Sequence[fx.Node]) -> None:
    """Adds a last iteration of which what nobody reads is gone: those of the next nodes that are as the loop says."""
    first, t = loop.first, loop.steps
    found: dict[int, fx.Node] = {}
    waiting = list(behind)
    for j, node in enumerate(first):
        if waiting and token(waiting[0]) == token(node) and _is_place(loop, j, t, waiting[0], found):
            found[j] = waiting.pop(0)
    if not found or any(isinstance(o, Own) and o.place not in found for j in found for o in loop.operands[j]):
        return
    for j, row in enumerate(loop.operands):
        for i, operand in enumerate(row):
            if isinstance(operand, Each) and j in found:
                row[i] = Each((*operand.values, leaves(spelled(found[j]))[i]))
    loop.iterations.append([found.get(j) for j in range(len(first))])


def _is_place(loop: Loop, j: int, t: int, node: fx.Node, found: dict[int, fx.Node]) -> bool:
    """Whether `node` is what place j computes in iteration t, of which `found` are the nodes so far."""
    values, row = leaves(spelled(node)), loop.operands[j]
    inside = loop.nodes() if any(isinstance(operand, Each) for operand in row) else set()
    if len(values) != len(row):
        return False
    for operand, value in zip(row, values, strict=True):
        match operand:
            case Own(place):
                right = value is found.get(place)
            case Carried(place):
                right = value is loop.iterations[-1][place]
            case Outside(fx.Node() as same):
                right = value is same
            case Outside(literal):
                right = not isinstance(value, fx.Node) and equal(value, literal)
            case Counted(first, step):
                right = type(value) is int and value == first + step * t
            case Each(others):
                right = isinstance(value, fx.Node) and kind(value_of(value)) == kind(value_of(others[0]))
                right = right and value not in inside and value not in found.values()
        if not right:
            return False
    return True
