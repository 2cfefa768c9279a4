"""What the operands of one place of an unrolled loop have in common over its iterations.

A place is a node of the body; iteration t has a node of the graph at each place. An operand of a place is, in all
iterations alike: a value or number from outside, a value of the same iteration, a value of the iteration before, one of
a list, or a whole number a + b t.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from ringopt.ir.nodes import op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import formula, slice_of


@dataclass(frozen=True)
class Outside:
    """The same node or literal in all iterations."""

    value: Any


@dataclass(frozen=True)
class Own:
    """The value of a place, of the same iteration."""

    place: int


@dataclass(frozen=True)
class Carried:
    """The value of a place, of the iteration before."""

    place: int


@dataclass(frozen=True)
class Each:
    """Of every iteration another value from outside; of a last one that lacks the place, none."""

    values: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Counted:
    """first + step * t."""

    first: int
    step: int


Operand = Outside | Own | Carried | Each | Counted

# Of ops that take a part of a dim or write one, where their dim and the places in it stand.
PART_OF = {"slice": 1, "select": 1, "narrow": 1, "slice_scatter": 2, "select_scatter": 2}


def spelled(node: fx.Node) -> tuple[Any, Any]:
    """Arguments, (args, kwargs). Those of parts with the dim and the places counted from the start and within the dim,
    where its size is known: the last iteration may say "to the end"."""
    name, args = op_name(node), tuple(node.args)
    at = PART_OF.get(name)
    if at is None or node.kwargs or not isinstance(args[0], fx.Node):
        return args, node.kwargs
    dim = (args[at] if len(args) > at else 0) % len(shape_of(args[0]))
    size = shape_of(args[0])[dim]
    given = args[at + 1 :]
    if not isinstance(size, int) or not all(isinstance(each, int) or each is None for each in given):
        return args, node.kwargs
    if name.startswith("slice"):
        start, end, step = (list(given) + [None, None, 1][len(given) :])[:3]
        first, step, count = slice_of(size, start, end, step)
        return (*args[:at], dim, first, first + count if step == 1 else end, step), {}
    return (*args[:at], dim, given[0] % size, *given[1:]), {}


def leaves(arguments: Any) -> list[Any]:
    """Nodes and literals, in order."""
    found: list[Any] = []

    def note(value: Any) -> Any:
        found.append(value)
        return value

    map_aggregate(arguments, note)
    return found


def with_leaves(arguments: Any, values: Iterator[Any]) -> Any:
    """The same with other leaves."""
    return map_aggregate(arguments, lambda _: next(values))


Token = tuple[Any, ...]


def token(node: fx.Node) -> Token:
    """What nodes at one place of a loop have in common."""
    return (node.target, kind(value_of(node)))


def kind(value: Any) -> Any:
    """Of tensors: shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        return (tuple(formula(size) for size in value.shape), value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return tuple(map(kind, value))
    return type(value)


At = Mapping[fx.Node, tuple[int, int]]  # iteration and place of the nodes of a loop


def common(values: Sequence[Any], at: At) -> Operand | None:
    """What the operands at one place of all iterations are; None where nothing says it of all alike."""
    first = values[0]
    if isinstance(first, fx.Node):
        return _of_nodes(values, at) if all(isinstance(value, fx.Node) for value in values) else None
    if any(isinstance(value, fx.Node) for value in values):
        return None
    if all(equal(value, first) for value in values):
        return Outside(first)
    if all(type(value) is int for value in values):
        step = values[1] - first
        if all(value == first + step * t for t, value in enumerate(values)):
            return Counted(first, step)
    return None


def _of_nodes(values: Sequence[fx.Node], at: At) -> Operand | None:
    where = [at.get(value) for value in values]
    if where[0] is None and all(value is values[0] for value in values):
        return Outside(values[0])
    place = where[1][1] if where[1] is not None else None
    if place is None:
        alike = all(each is None for each in where) and len({kind(value_of(value)) for value in values}) == 1
        return Each(tuple(values)) if alike else None
    if all(each == (t, place) for t, each in enumerate(where)):
        return Own(place)
    if where[0] is None and all(each == (t, place) for t, each in enumerate(where[1:])):
        return Carried(place)
    return None


def equal(one: Any, other: Any) -> bool:
    """Of literals: by value and type, open sizes by their formulas."""
    return type(one) is type(other) and bool(formula(one) == formula(other))
