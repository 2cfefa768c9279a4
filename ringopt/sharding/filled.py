"""Values filled with one number, made in rows where rows of them are wanted.

    mask = new_ones(chosen, [2, n, n])   ->   mask = full([2, 5, n], 1)

Cut from the whole they would take its memory, and keep alive what their dtype and device are taken from.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.fx as fx

from ringopt.ir.nodes import NEW, is_aten, named, op_name, value_of
from ringopt.ir.placement import Sharded
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten

NUMBERS = {"zeros": 0, "new_zeros": 0, "ones": 1, "new_ones": 1}  # of the others an argument


def fill_in_rows(sharder: Sharder, graph: fx.Graph) -> None:
    """Lets demands for rows of such values make these rows."""
    for node in graph.nodes:
        if is_aten(node) and op_name(node) in ("full", "zeros", "ones", "empty", *NEW):
            sharder.climbers[node] = partial(filled, sharder, node)


def filled(sharder: Sharder, node: fx.Node, placement: Sharded) -> fx.Node | None:
    """This rank's rows; None where their number is known only at run time, and is not the size itself."""
    rows, value = sharder.rows(placement.length), value_of(node)
    if isinstance(rows, fx.Node) and placement.outer * placement.inner != 1:
        return None
    sizes = list(fx.map_arg(named(node, "size"), sharder.values.__getitem__))
    sizes[placement.dim] = rows if isinstance(rows, fx.Node) else placement.outer * rows * placement.inner
    given = {"dtype": value.dtype, "device": value.device}
    if op_name(node) in ("empty", "new_empty"):
        return sharder.call(aten.empty.memory_format, (sizes,), node, placement, given)
    number = NUMBERS[op_name(node)] if op_name(node) in NUMBERS else named(node, "fill_value")
    number = sharder.values[number] if isinstance(number, fx.Node) else number
    return sharder.call(aten.full.default, (sizes, number), node, placement, given)
