"""Rows made more of a sequence: nearest neighbours, on each rank of its own rows.

y = upsample_nearest2d(x, 2H, 2W)   ->   y_rows = repeat_interleave(repeat_interleave(x_rows, 2, 2), 2, 3)
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.fx as fx

from ringopt.graph.nodes import op_name, shape_of
from ringopt.graph.sharder import Sharder
from ringopt.sharding.steps import Handler, Steps

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


RESAMPLING: dict[str, Handler] = dict.fromkeys(("upsample_nearest1d", "upsample_nearest2d"), nearest)
