"""Rows made more of a sequence: nearest neighbours, and several made of each, on each rank of its own rows.

y = upsample_nearest2d(x, 2H, 2W)       ->   y_rows = repeat_interleave(repeat_interleave(x_rows, 2, 2), 2, 3)
y = conv_transpose1d(x, w, stride=2)    ->   y_rows = conv_transpose1d(x_rows, w, stride=2)      # w has two rows
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from ringopt.ir.nodes import named, op_name, shape_of
from ringopt.ir.symbolic_sizes import is_open
from ringopt.sharding.emit import Handler, Steps
from ringopt.sharding.handlers.conv_padding import sizes
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def nearest(sharder: Sharder, node: fx.Node) -> bool:
    """Twice, four times, ... as many of each dim, which torch finds by multiplying with 1/2, 1/4, ...: no rounding."""
    x, moving = node.args[0], int(op_name(node)[-2])
    place, before, after = sharder.placements[x], shape_of(x)[-moving:], shape_of(node)[-moving:]
    times = [new // old for old, new in zip(before, after, strict=True)]
    exact = all(old * n == new for old, n, new in zip(before, times, after, strict=True))
    if place is None or not exact or any(n & (n - 1) for n in times):
        return False
    first, step, y = len(shape_of(x)) - moving, Steps(sharder, node), sharder.values[x]
    for dim, n in enumerate(times, start=first):
        if n > 1:
            place = replace(place, inner=place.inner * n) if dim == place.dim else place
            y = step(aten.repeat_interleave.self_int, y, n, dim, placement=place)
    return step.done(y, place)


def transposed(sharder: Sharder, node: fx.Node) -> bool:
    """Along a dim in which the kernel is as long as its stride: no two rows lead to one. Not of open length: Inductor
    lowers no convolution over a number of rows that is known when it runs."""
    x, weight, bias = (named(node, name) for name in ("input", "weight", "bias"))
    moving, place = len(shape_of(weight)) - 2, sharder.placements[x]
    at = place.dim - (len(shape_of(x)) - moving) if place is not None else -1
    if place is None or at < 0 or sharder.ranks.asks or is_open(place.length):
        return False
    stride, *rest = (
        sizes(named(node, name), moving)[at] for name in ("stride", "padding", "output_padding", "dilation")
    )
    if stride != shape_of(weight)[2 + at] or rest != [0, 0, 1]:
        return False
    step, out = Steps(sharder, node), replace(place, inner=place.inner * stride)
    small = [sharder.copied(each) if each is not None else None for each in (weight, bias)]
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    args = (sharder.values[x], *small, *(named(node, name) for name in names))
    return step.done(step(node.target, *args, placement=out), out)


RESAMPLING: dict[str, Handler] = {
    **dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d"), nearest),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed),
}
