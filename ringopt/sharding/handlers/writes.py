"""Rows that are written by number, known only when the program runs.

    y = index_copy(x, 1, i, a)   ->   at     = index(places, [i])           # a row of this rank, or 0 for another's
                                      y_rows = slice(index_copy(pad(x_rows, one row), 1, at, copy_to_group(a)), 1, 1)

Each rank has what is written, and a row before its own that takes what is meant for other ranks. So numbers that come
twice do what they do in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import same
from ringopt.sharding.emit import Handler, Steps, enough_rows
from ringopt.sharding.handlers.joins import kept_whole
from ringopt.sharding.handlers.rows import sequence_among
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def by_number(sharder: Sharder, node: fx.Node) -> bool:
    """index_copy, index_fill, scatter."""
    x, dim, index, written, *how = node.args
    place = rows_of(sharder, node, [dim % len(shape_of(node))])
    if place is None:
        return False
    step = Steps(sharder, node)
    at = here(step, whole_numbers(step, index), place)
    value = sharder.copied(written) if isinstance(written, fx.Node) else written
    return _finished(step, place, (room_before(step, sharder.sharded(x, place), place), dim, at, value, *how))


def index_put(sharder: Sharder, node: fx.Node) -> bool:
    """Where one of the tensors of numbers counts rows of the sequence."""
    x, indices, written, *how = node.args
    numbers = [dim for dim, i in enumerate(indices) if i is not None]
    place = rows_of(sharder, node, numbers)
    if place is None or any(value_of(indices[dim]).dtype not in (torch.int32, torch.int64) for dim in numbers):
        return False
    step = Steps(sharder, node)
    whole = [None if i is None else whole_numbers(step, i) for i in indices]
    whole[place.dim] = here(step, whole[place.dim], place)
    rows = room_before(step, sharder.sharded(x, place), place)
    return _finished(step, place, (rows, whole, sharder.copied(written), *how))


def rows_of(sharder: Sharder, node: fx.Node, dims: Sequence[int]) -> Sharded | None:
    """How what is written to along `dims` is sharded, or is to be: also a replicated value, such as zeros, that is as
    long as a sequence of which there are rows to write (another is a table, of which rows are picked next), where the
    whole is not asked for next."""
    x = node.args[0]
    if sharder.placements[x] is not None:
        found = sequence_among(sharder, x, dims)
        place = found[0] if found is not None else None
    else:
        size, held = shape_of(x)[dims[0]], filter(None, map(sharder.placements.get, tensor_args(node)))
        spread = len(dims) == 1 and any(same(at.size, size) for at in held) and not kept_whole(node)
        place = Sharded(dims[0], 1, size, 1) if spread else None
    return place if place is not None and enough_rows(sharder, place.length) else None


def whole_numbers(step: Steps, index: fx.Node) -> fx.Node:
    """Those that `expand` repeats are gathered once."""
    if op_name(index) == "expand":
        return step(aten.expand.default, whole_numbers(step, index.args[0]), list(shape_of(index)))
    return step.sharder.replicated(index)


def here(step: Steps, numbers: fx.Node, place: Sharded) -> fx.Node:
    """Where the rows of these numbers are on this rank, counted from 1; 0 for those of other ranks."""
    device = value_of(step.node).device
    mine = step.numbers(place, device)
    counted = step(aten.cumsum.default, step(aten.ones_like.default, mine), 0)
    nowhere = step(aten.zeros.default, [place.length], dtype=torch.int64, device=device)
    return step(aten.index.Tensor, step(aten.index_copy.default, nowhere, 0, mine, counted), [numbers])


def room_before(step: Steps, rows: fx.Node, place: Sharded) -> fx.Node:
    """The rows of this rank behind one for what other ranks are to have."""
    behind = [0, 0] * (len(shape_of(step.node)) - 1 - place.dim)
    return step(aten.constant_pad_nd.default, rows, [*behind, 1, 0])


def _finished(step: Steps, place: Sharded, args: tuple[Any, ...]) -> bool:
    value = step(step.node.target, *args, **step.node.kwargs)
    return step.done(step(aten.slice.Tensor, value, place.dim, 1, placement=place), place)


WRITES: dict[str, Handler] = {
    **dict.fromkeys(("index_copy", "index_fill", "scatter"), by_number),
    "index_put": index_put,
}
