"""Ops that mix the rows of a sequence, computed on shards: one file a family.

A handler `(sharder, node) -> bool` is asked for a node that has a sharded operand and no rule that carries the sharding
on (ringopt/graph/axes.py). It writes the local form of the node and what the ranks tell each other, and places the
result; or it answers False before writing anything, and the op runs on other dims (columns.py) or gathered operands.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.graph.nodes import is_aten, op_name, tensor_args
from ringopt.graph.sharder import Sharder
from ringopt.sharding.batches import attended
from ringopt.sharding.columns import by_columns
from ringopt.sharding.draws import DRAWS
from ringopt.sharding.extremes import EXTREMES
from ringopt.sharding.joins import JOINS
from ringopt.sharding.layers import LAYERS
from ringopt.sharding.losses import LOSSES
from ringopt.sharding.neighbours import NEIGHBOURS
from ringopt.sharding.norms import NORMS
from ringopt.sharding.resampling import RESAMPLING
from ringopt.sharding.routing import routed
from ringopt.sharding.rows import ROWS
from ringopt.sharding.steps import Handler
from ringopt.sharding.sums import SUMS, partial_sums
from ringopt.sharding.views import plain, reshaped
from ringopt.sharding.writes import WRITES

HANDLERS: dict[str, Handler] = {
    **SUMS, **ROWS, **JOINS, **NEIGHBOURS, **LOSSES, **EXTREMES, **NORMS, **LAYERS, **DRAWS, **RESAMPLING,
    **WRITES,
}  # fmt: skip


def across(sharder: Sharder, node: fx.Node) -> bool:
    """Places `node`, whose rows come from several ranks; False where nothing here knows how."""
    handler = HANDLERS.get(op_name(node)) if is_aten(node) else None
    if any(way(sharder, node) for way in (partial_sums, reshaped, attended, routed)):
        return True
    if handler is None:
        return by_columns(sharder, node)
    if handler(sharder, node) or (plain(sharder, next(tensor_args(node))) and handler(sharder, node)):
        return True
    return by_columns(sharder, node)
