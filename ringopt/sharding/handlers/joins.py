"""Concatenation along the sequence, and writes to some of its tokens (select_scatter, slice_scatter).

    y = cat([a, x], 1)   ->   moved  = fetch_rows(x_rows, "move -2:1:13")
                              y_rows = where(rows >= 2, moved, index_select(copy_to_group(a), 1, clamp(rows, 0, 1)))
    y[:, 0] = 0          ->   y_rows = where(rows == 0, 0, y_rows)

`rows` are the positions of this rank's tokens. A `where`, not a sum of values padded with zeros, since 0 + x is not
always x.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.fx as fx

from ringopt.dims.op_families import COPIES, PADS, PERMUTATIONS, RESHAPES
from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import place_of, slice_of
from ringopt.ops.fetch_rows import apart, moved
from ringopt.sharding.emit import Handler, Steps, enough_rows, sequence_at
from ringopt.sharding.handlers.rows import pad
from ringopt.sharding.handlers.views import without_outer_factor
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


class Joined(Steps):
    """The steps of `node`, a sequence along `dim` that is made of parts; it is sharded as `out`."""

    def __init__(self, sharder: Sharder, node: fx.Node, dim: int):
        super().__init__(sharder, node)
        self.out = Sharded(dim, 1, shape_of(node)[dim], 1)
        self.rows = self.numbers(self.out, value_of(node).device)
        sizes = [-1 if other == dim else 1 for other in range(len(shape_of(node)))]
        self.column = self(aten.reshape.default, self.rows, sizes)

    def part(self, x: fx.Node, start: int, stride: int = 1) -> fx.Node:
        """This rank's shard of the result if `x` begins at token `start`, its tokens `stride` apart; unspecified
        outside."""
        place, count = self.sharder.placements[x], shape_of(x)[self.out.dim]
        if place == Sharded(self.out.dim, 1, count, 1):
            length = self.out.length
            wanted = moved((-start, 1, length)) if stride == 1 else apart(length, stride, start)
            local = self.fetch(self.sharder.values[x], place, wanted, self.out)
        else:
            past = self(aten.sub.Scalar, self.rows, start)
            past = past if stride == 1 else self(aten.floor_divide.Scalar, past, stride)
            at = self(aten.clamp.default, past, 0, count - 1)
            whole = self.sharder.copied(x)
            local = self(aten.index_select.default, whole, self.out.dim, at, placement=self.out)
        return self.cast(local, value_of(self.node).dtype)

    def where(self, from_row: int, to_row: int, inside: fx.Node, outside: fx.Node, stride: int = 1) -> fx.Node:
        after = self(aten.ge.Scalar, self.column, from_row)
        among = self(aten.logical_and.default, after, self(aten.lt.Scalar, self.column, to_row))
        if stride != 1:
            past = self(aten.remainder.Scalar, self(aten.sub.Scalar, self.column, from_row), stride)
            among = self(aten.logical_and.default, among, self(aten.eq.Scalar, past, 0))
        return self(aten.where.self, among, inside, outside, placement=self.out)


def cat(sharder: Sharder, node: fx.Node) -> bool:
    """Concatenation along the sequence: each part is moved to the layout of the result, and chosen by its place."""
    rank, length = len(shape_of(node)), shape_of(node)[named(node, "dim")]
    dim = named(node, "dim") % rank
    parts = [x for x in node.args[0] if len(shape_of(x)) == rank and shape_of(x)[dim] != 0]
    ends = list(accumulate(shape_of(x)[dim] for x in parts))
    for x in parts:
        without_outer_factor(sharder, x)
    cut = any(sequence_at(sharder, x, [dim]) is not None for x in parts)
    if not cut or not enough_rows(sharder, length):
        return False
    step = Joined(sharder, node, dim)
    value = step.part(parts[0], 0)
    for x, start, end in zip(parts[1:], ends, ends[1:], strict=False):
        value = step.where(start, end, step.part(x, start), value)
    nothing = [sharder.replicated(x) for x in node.args[0] if x not in parts and sharder.carries[x]]
    if nothing:  # its gradient is as empty, and not none
        value = step(aten.cat.default, [value, *nothing], dim, placement=step.out)
    return step.done(value, step.out)


def select_scatter(sharder: Sharder, node: fx.Node) -> bool:
    """Writes one token, which is replicated: the rank that holds it takes it."""
    base, written, dim, index = node.args
    place = sequence_at(sharder, base, [dim])
    if place is None:
        return False
    step, row = Joined(sharder, node, place.dim), place_of(index, place.length)
    whole = step(aten.unsqueeze.default, sharder.copied(written), place.dim)
    return step.done(step.where(row, row + 1, whole, sharder.values[base]), place)


def slice_scatter(sharder: Sharder, node: fx.Node) -> bool:
    """Also into a replicated value, such as zeros, of which each rank then has its rows; but not where the whole is
    asked for next (a cache, an output that is padded): there the rows that are written are fewer to gather."""
    base, written, dim = node.args[0], node.args[1], named(node, "dim") % len(shape_of(node))
    place = sequence_at(sharder, base, [dim])
    if sharder.placements[base] is None and sequence_at(sharder, written, [dim]) is not None and not kept_whole(node):
        place = Sharded(dim, 1, shape_of(base)[dim], 1)
    start, stride, count = slice_of(shape_of(base)[dim], *(named(node, name) for name in ("start", "end", "step")))
    if place is None or not count or not enough_rows(sharder, place.length):
        return False
    without_outer_factor(sharder, written)
    step = Joined(sharder, node, place.dim)
    inside, end = step.part(written, start, stride), start + (count - 1) * stride + 1
    return step.done(step.where(start, end, inside, sharder.sharded(base, place), stride), place)


SAME_ENTRIES = frozenset((*COPIES, *RESHAPES, *PERMUTATIONS, "detach", "unsqueeze", "select_scatter", "slice_scatter"))


def kept_whole(node: fx.Node) -> bool:
    """Whether it, or what it is a part of, is an output or the last value of an input."""
    seen, waiting = {node}, [node]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "output" or op_name(user) == "copy_":
                return True
            if op_name(user) in SAME_ENTRIES and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def filled(sharder: Sharder, node: fx.Node) -> bool:
    """Padding of the sequence by a number other than 0; by what `rows` knows otherwise."""
    if pad(sharder, node):
        return True
    place, amounts = sharder.placements[node.args[0]], list(named(node, "pad"))
    constant = op_name(node) == "constant_pad_nd" or named(node, "mode") == "constant"
    if (
        place is None
        or place.outer * place.inner > 1
        or not constant
        or not enough_rows(sharder, shape_of(node)[place.dim])
    ):
        return False
    at = 2 * (len(shape_of(node)) - 1 - place.dim)
    if any(amounts[:at]) or any(amounts[at + 2 :]):
        return False
    step = Joined(sharder, node, place.dim)
    moved_rows, before = step.part(node.args[0], amounts[at]), max(amounts[at], 0)
    last = amounts[at] + place.length
    after, until = step(aten.ge.Scalar, step.column, before), step(aten.lt.Scalar, step.column, last)
    among = step(aten.logical_and.default, after, until)
    return step.done(
        step(aten.where.ScalarOther, among, moved_rows, named(node, "value"), placement=step.out), step.out
    )


JOINS: dict[str, Handler] = {
    "cat": cat,
    "select_scatter": select_scatter,
    "slice_scatter": slice_scatter,
    **dict.fromkeys(PADS, filled),
}
