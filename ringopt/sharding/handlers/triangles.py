"""Triangles of scores whose queries, or keys, are sharded: by the global places of this rank's rows.

    y = tril(x, 1)   ->   numbers = scatter(arange(n))
                          y = where(arange(k) - numbers[:, None] <= 1, x_rows, 0)
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.sharding.emit import Handler, Steps, sequence_at
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def triangle(sharder: Sharder, node: fx.Node) -> bool:
    """triu keeps where column - row >= diagonal, tril where <=."""
    x = node.args[0]
    rows, columns = len(shape_of(x)) - 2, len(shape_of(x)) - 1
    place = sequence_at(sharder, x, [rows]) or sequence_at(sharder, x, [columns])
    if place is None:
        return False
    step, device = Steps(sharder, node), value_of(x).device
    places = [
        step.numbers(place, device) if dim == place.dim else step(aten.arange.default, shape_of(x)[dim], device=device)
        for dim in (rows, columns)
    ]
    away = step(aten.sub.Tensor, places[1], step(aten.unsqueeze.default, places[0], 1))
    kept = step(aten.le.Scalar if op_name(node) == "tril" else aten.ge.Scalar, away, named(node, "diagonal"))
    return step.done(step(aten.where.ScalarOther, kept, sharder.values[x], 0, placement=place), place)


TRIANGLES: dict[str, Handler] = dict.fromkeys(("tril", "triu"), triangle)
