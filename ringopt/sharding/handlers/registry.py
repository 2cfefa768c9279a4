"""Ops that mix the tokens of a sequence, computed on shards: one file a family.

A handler `(sharder, node) -> bool` is called for a node with a sharded operand and no rule that propagates the sharding
(ringopt/dims/rules.py). It emits the local form of the node with its communication, and places the result; or it
returns False before emitting anything, and the op runs on other dims (by_columns.py) or on gathered operands.
"""

from __future__ import annotations

import torch.fx as fx

from ringopt.ir.nodes import is_aten, op_name, tensor_args
from ringopt.sharding.emit import Handler
from ringopt.sharding.handlers.argmax import EXTREMES
from ringopt.sharding.handlers.batched_attention import attended
from ringopt.sharding.handlers.by_columns import by_columns
from ringopt.sharding.handlers.halo import NEIGHBOURS
from ringopt.sharding.handlers.joins import JOINS
from ringopt.sharding.handlers.layers import LAYERS
from ringopt.sharding.handlers.losses import LOSSES
from ringopt.sharding.handlers.moe_routing import routed, routed_by_table
from ringopt.sharding.handlers.norms import NORMS
from ringopt.sharding.handlers.random import DRAWS
from ringopt.sharding.handlers.resampling import RESAMPLING
from ringopt.sharding.handlers.rows import ROWS
from ringopt.sharding.handlers.sums import SUMS, partial_sums
from ringopt.sharding.handlers.triangles import TRIANGLES
from ringopt.sharding.handlers.views import reshaped, without_outer_factor
from ringopt.sharding.handlers.writes import WRITES
from ringopt.sharding.sharder import Sharder

HANDLERS: dict[str, Handler] = {
    **SUMS, **ROWS, **JOINS, **NEIGHBOURS, **LOSSES, **EXTREMES, **NORMS, **LAYERS, **DRAWS, **RESAMPLING,
    **WRITES, **TRIANGLES,
}  # fmt: skip


def across(sharder: Sharder, node: fx.Node) -> bool:
    """Places `node`, whose tokens come from several ranks; False where no handler covers it. Of nodes that every rank
    could compute, it places what sorts sharded tokens."""
    if not any(map(sharder.placements.get, tensor_args(node))):
        return routed_by_table(sharder, node)
    handler = HANDLERS.get(op_name(node)) if is_aten(node) else None
    if any(way(sharder, node) for way in (partial_sums, reshaped, attended, routed)):
        return True
    if handler is None:
        return by_columns(sharder, node)
    if handler(sharder, node) or (without_outer_factor(sharder, next(tensor_args(node))) and handler(sharder, node)):
        return True
    return by_columns(sharder, node)
