"""Rows made more of a sequence: nearest neighbours, and several made of each, on each rank of its own rows.

y = upsample_nearest2d(x, 2H, 2W)       ->   y_rows = repeat_interleave(repeat_interleave(x_rows, 2, 2), 2, 3)
y = conv_transpose1d(x, w, stride=2)    ->   y_rows = conv_transpose1d(x_rows, w, stride=2)      # w has two rows

Where rows of a transposed convolution are sums of several, each rank has the rows of its neighbours that go into its
own (ops/fetch_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from ringopt.dims.op_families import TRANSPOSED_CONVOLUTIONS
from ringopt.ir.nodes import arguments_of, named, op_name, shape_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open
from ringopt.ops.fetch_rows import Wanted, window_rows
from ringopt.sharding.emit import Handler, Steps, enough_rows
from ringopt.sharding.handlers.conv_padding import sizes
from ringopt.sharding.seen_rows import seen_rows
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def nearest(sharder: Sharder, node: fx.Node) -> bool:
    """Twice, four times, ... as many of each dim, which torch finds by multiplying with 1/2, 1/4, ...: no rounding. (By
    a scale factor of 2.1 it finds others, though there may be twice as many.)"""
    x, moving = node.args[0], int(op_name(node)[-2])
    place, before, after = sharder.placements[x], shape_of(x)[-moving:], shape_of(node)[-moving:]
    times = [new // old for old, new in zip(before, after, strict=True)]
    exact = all(old * n == new for old, n, new in zip(before, times, after, strict=True)) and by(node) in ([], times)
    if place is None or not exact or any(n & (n - 1) for n in times):
        return False
    first, step, y = len(shape_of(x)) - moving, Steps(sharder, node), sharder.values[x]
    for dim, n in enumerate(times, start=first):
        if n > 1:
            place = replace(place, inner=place.inner * n) if dim == place.dim else place
            y = step(aten.repeat_interleave.self_int, y, n, dim, placement=place)
    return step.done(y, place)


def by(node: fx.Node) -> list[float]:
    """The scale factors that are given."""
    given = [value for name, value in arguments_of(node).items() if name.startswith("scale") and value is not None]
    return [factor for value in given for factor in (value if isinstance(value, (list, tuple)) else [value])]


def transposed(sharder: Sharder, node: fx.Node) -> bool:
    """Along a dim in which the kernel moves. Not of open length: Inductor lowers no convolution over a number of rows
    that is known when it runs."""
    x, weight, bias = (named(node, name) for name in ("input", "weight", "bias"))
    moving, place = len(shape_of(weight)) - 2, sharder.placements[x]
    at = place.dim - (len(shape_of(x)) - moving) if place is not None else -1
    if place is None or at < 0 or sharder.ranks.asks or is_open(place.length) or is_open(shape_of(node)[place.dim]):
        return False
    names = ("stride", "padding", "output_padding", "dilation")
    how = {name: sizes(named(node, name), moving) for name in names}
    kernel = shape_of(weight)[2 + at]
    small = [sharder.copied(each) if each is not None else None for each in (weight, bias)]

    def local(step: Steps, rows: fx.Node, out: Sharded) -> fx.Node:
        alone = {name: list(how[name]) for name in names}
        alone["padding"][at] = alone["output_padding"][at] = 0
        args = (alone["stride"], alone["padding"], alone["output_padding"], named(node, "groups"), alone["dilation"])
        return step(node.target, rows, *small, *args, placement=out)

    stride, padding, extra, dilation = (how[name][at] for name in names)
    if (stride, padding, extra, dilation) == (kernel, 0, 0, 1):  # no two rows lead to one
        step, out = Steps(sharder, node), replace(place, inner=place.inner * stride)
        return step.done(local(step, sharder.values[x], out), out)
    return overlapping(sharder, node, place, local, Reach(stride, padding, dilation * (kernel - 1)))


@dataclass(frozen=True)
class Reach:
    """Row i of what is read goes into the rows from i * stride - padding on, `behind` of them behind the first."""

    stride: int
    padding: int
    behind: int

    def wanted(self, length: int) -> Wanted:
        """The rows that go into each of `length` rows."""
        start = self.padding - self.behind + self.stride - 1
        return window_rows(length, 1, start, (self.behind - self.stride) // self.stride + 2, self.stride)


def overlapping(
    sharder: Sharder, node: fx.Node, place: Sharded, local: Callable[[Steps, fx.Node, Sharded], fx.Node], reach: Reach
) -> bool:
    """Each chunk of the result is made of all rows that go into it, and of what these make besides cut out."""
    out, ranks = Sharded(place.dim, 1, shape_of(node)[place.dim], 1), sharder.ranks
    gaps = reach.behind < reach.stride - 1
    if place.outer * place.inner > 1 or gaps or not enough_rows(sharder, out.length):
        return False
    step, wanted, layout = Steps(sharder, node), reach.wanted(out.length), ranks.layout(out.length)
    chunks = wanted.chunks(layout, ranks.size, ranks.rank)
    read = wanted.ranges(layout, ranks.size, ranks.rank)
    parts = []
    pieces = seen_rows(step, sharder.values[named(node, "input")], place, wanted, out)
    for piece, rows, chunk in zip(pieces, read, chunks, strict=True):
        first = chunk.start + reach.padding - rows.start * reach.stride
        whole = local(step, piece, out)
        parts.append(step(aten.narrow.default, whole, place.dim, first, len(chunk), placement=out))
    if len(parts) == 1:
        return step.done(parts[0], out)
    return step.done(step(aten.cat.default, parts, place.dim, placement=out), out)


RESAMPLING: dict[str, Handler] = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), nearest),
    **dict.fromkeys(TRANSPOSED_CONVOLUTIONS, transposed),
}
