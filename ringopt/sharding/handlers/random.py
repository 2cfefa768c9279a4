"""Random numbers of a shard, by option `random`: by position, or each rank's own."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ringopt.ir.nodes import named, value_of
from ringopt.ops import operators
from ringopt.ops.dropout import SEEDS
from ringopt.sharding.emit import Handler, Steps
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def dropout(sharder: Sharder, node: fx.Node) -> bool:
    """Of a shard, each rank from its own stream; of a replicated value, by every rank alike (the walk's default)."""
    x = node.args[0]
    placement, step = sharder.placements[x], Steps(sharder, node)
    seed = step(aten.randint.default, SEEDS, [], dtype=torch.int64, device=value_of(x).device)
    both = step.over_ranks(operators.dropout.default, x=sharder.values[x], seed=seed, p=named(node, "p"))
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, placement), placement)
    return True


def place_seeds(sharder: Sharder, node: fx.Node) -> None:
    """Seeds, drawn by every rank and compared at every call."""
    sharder.whole(node)
    agreed = Steps(sharder, node).over_ranks(operators.agreed_seeds.default, given=sharder.values[node])
    sharder.set(node, agreed, None)


DRAWS: dict[str, Handler] = {"dropout": dropout}
