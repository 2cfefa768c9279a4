"""Extremes (amax, max, argmax) and any/all over the sequence: of each shard, then over the ranks.

y = amax(x, [1])   ->   y = extreme(x_rows, [1], True)
y = any(x, 1)      ->   y = any(gather(unsqueeze(any(x_rows, 1), 0)), 0)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import named, op_name, value_of
from ringopt.ops import operators
from ringopt.sharding.emit import Handler, Steps, dims_of, getitems, keeps_dims, sequence_at
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def _reduced_over(sharder: Sharder, node: fx.Node, dims: list[int]) -> bool:
    place = sharder.placements[node.args[0]]
    return place is not None and place.dim in dims


def amax(sharder: Sharder, node: fx.Node) -> bool:
    """amax, amin, and max, min of all elements, whose gradient is shared by ties in the same way."""
    dims = dims_of(node)
    if not _reduced_over(sharder, node, dims):
        return False
    step, largest = Steps(sharder, node), op_name(node) in ("amax", "max")
    x = sharder.values[node.args[0]]
    found = step.over_ranks(operators.extreme.default, x=x, dims=dims, largest=largest)
    return step.done(found if keeps_dims(node) else step(aten.squeeze.dims, found, dims))


def max_(sharder: Sharder, node: fx.Node) -> bool:
    """max, min: of all elements, or along the sequence with the place of the first extreme."""
    if node.target in (aten.max.default, aten.min.default):
        return amax(sharder, node)
    users = getitems(node)
    if node.target not in (aten.max.dim, aten.min.dim) or users is None:
        return False
    found = first(sharder, node, op_name(node) == "max")
    if found is None:
        return False
    step = Steps(sharder, node)
    return all(step.done(found[user.args[1]], of=user) for user in users)


def argmax(sharder: Sharder, node: fx.Node) -> bool:
    """argmax, argmin along the sequence: each rank's extreme is gathered with its place; the first of equals wins."""
    found = first(sharder, node, op_name(node) == "argmax") if named(node, "dim") is not None else None
    return found is not None and Steps(sharder, node).done(found[1])


def first(sharder: Sharder, node: fx.Node, largest: bool) -> tuple[fx.Node, fx.Node] | None:
    """The largest (smallest) element along the sequence and the row where it first is. A NaN is larger, and smaller,
    than all others, as eager has it. The gradient goes to that row."""
    x, dim = node.args[0], named(node, "dim")
    place = sequence_at(sharder, x, [dim])
    if place is None or dim is None or sharder.ranks.asks:
        return None
    step = Steps(sharder, node)
    both = step(aten.max.dim if largest else aten.min.dim, sharder.values[x], dim, True)
    mine, at = (step.item(both, i) for i in (0, 1))
    numbers = step.numbers(place, value_of(x).device)
    values, rows = step.parts(mine), step.parts(step(aten.index.Tensor, numbers, [at]))
    detached = step(aten.detach.default, values)
    best = step(aten.amax.default if largest else aten.amin.default, detached, [0], True)
    equal = step(
        aten.logical_or.default, step(aten.eq.Tensor, detached, best), step(aten.ne.Tensor, detached, detached)
    )
    candidates = step(aten.where.ScalarOther, equal, rows, place.length)
    rank = step(aten.argmin.default, candidates, 0, True)
    outcome: list[Any] = [step(aten.gather.default, x, 0, rank) for x in (values, rows)]
    gone = [0] if keeps_dims(node) else [0, place.dim + 1]
    value, row = (step(aten.squeeze.dims, found, gone) for found in outcome)
    return value, row


def any_(sharder: Sharder, node: fx.Node) -> bool:
    """any, all: reduced on each rank, then over the gathered results."""
    dims = dims_of(node)
    if sharder.ranks.asks or not _reduced_over(sharder, node, dims):
        return False
    step = Steps(sharder, node)
    overall = aten.any if op_name(node) == "any" else aten.all
    local = step(overall.dims, sharder.values[node.args[0]], dims, keeps_dims(node))
    return step.done(step(overall.dim, step.parts(local), 0))


EXTREMES: dict[str, Handler] = {
    **dict.fromkeys(("amax", "amin"), amax),
    **dict.fromkeys(("max", "min"), max_),
    **dict.fromkeys(("argmax", "argmin"), argmax),
    **dict.fromkeys(("any", "all"), any_),
}
