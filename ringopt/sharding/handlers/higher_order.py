"""Higher-order operators (`torch.cond`, `scan`, `while_loop`, `map`): whole on every rank, their results cut again."""

from __future__ import annotations

import torch.fx as fx

from ringopt.ir.autograd_function import HigherOrder, operands_of
from ringopt.ir.nodes import is_tensor, op_name, shape_of, source_line
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import same
from ringopt.sharding.sharder import Sharder


def again_in_rows(sharder: Sharder, node: fx.Node) -> None:
    """Has what a higher-order operator gives cut like what it was given, where a dim has as many rows: it may be that
    nobody demands that by a rule, and the rest would be computed whole."""
    call = node.args[0] if op_name(node) == "getitem" else None
    if not isinstance(call, fx.Node) or not isinstance(call.target, HigherOrder) or not is_tensor(node):
        return
    for place in filter(None, map(sharder.placements.get, operands_of(call))):
        dims = [dim for dim, size in enumerate(shape_of(node)) if same(size, place.length)]
        if dims and place.outer == place.inner == 1:
            dim = place.dim if place.dim in dims else dims[0]
            sharder.sources[node] = Sharded(dim, 1, place.length, 1)
            return


def note_of_graphs(node: fx.Node) -> str:
    """For the report: a higher-order operator runs on every rank, and its products are in no figure."""
    where = f" ({line})" if (line := source_line(node)) else ""
    unknown = "what the graphs of a higher-order operator do to rows is not known"
    return f"{op_name(node)}{where} runs whole on every rank: {unknown}"
