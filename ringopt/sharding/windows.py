"""Windows of a sequence, each attended by itself: whole ones are spread, where nothing was cut before them.

    windows = view(x, [B * 8, 16, D])      # S(1 of 8x16x1) is what attention over 16 rows would want of x;
    y = attention(windows, ...)            # of S(1 of 1x8x16), windows, no rank needs anything of another

What attention demands is followed up to the reshape that made the windows, and what that reads is cut there. The first
dim is never taken for a sequence of windows, for it is the batch, or has it folded in.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.fx as fx

from ringopt.graph.axes import rule_of
from ringopt.graph.nodes import op_name, shape_of, tensor_args
from ringopt.graph.placement import Sharded
from ringopt.graph.rules import Rule, ViewRule
from ringopt.graph.sharder import Sharder
from ringopt.graph.sizes import is_open
from ringopt.sharding.joins import JOINS
from ringopt.sharding.rows import ROWS
from ringopt.sharding.sources import Demand, above, climb

Path = tuple[tuple[fx.Node, Rule, int], ...]  # the way down: a node, its rule, and the operand by which it is reached

MOVES = frozenset((*ROWS, *JOINS))  # ops that move the places of a dim, or some of them, and leave it that dim


def windows(sharder: Sharder, demands: Iterable[Demand], handled: frozenset[str]) -> list[Demand]:
    """How to spread the sequences that are cut into windows on the way to `demands`, of operands of attention; past ops
    among `handled` too, that mix rows."""
    pending: list[tuple[fx.Node, Sharded, Path]] = [(node, place, ()) for node, place in demands]
    seen, found = set[Demand](), list[Demand]()
    while pending:
        node, place, path = pending.pop()
        if (node, place) in seen or node.op != "call_function":
            continue
        seen.add((node, place))
        rule, operands = rule_of(node), list(tensor_args(node))
        climbed = climb(sharder, node, place)
        if climbed is None or rule is None:  # an op that mixes rows, of as many dims
            kept = () if isinstance(rule, ViewRule) else above(sharder, node, place, handled)
            pending += ((operand, at, path) for operand, at in kept if at.dim == place.dim)
            continue
        for operand, at in climbed:
            down = ((node, rule, operands.index(operand)), *path)
            whole = cut_whole(sharder, at, down) if isinstance(rule, ViewRule) else None
            if whole is not None:
                found.append((operand, whole))
            else:
                pending.append((operand, at, down))
    return found


def cut_whole(sharder: Sharder, place: Sharded, down: Path) -> Sharded | None:
    """Windows in the place of rows of each, where ranks can have equally many, and attention finds them beside the
    batch or the heads."""
    if sharder.asks or place.dim == 0 or any(map(is_open, (place.outer, place.length, place.inner))):
        return None
    least = sharder.least(place.outer)
    if place.outer < least or place.outer % least:
        return None
    whole = at = Sharded(place.dim, 1, place.outer, place.length * place.inner)
    for node, rule, index in down:
        pushed = rule.push(index, at)
        stays = op_name(node) in MOVES and len(shape_of(node)) == len(shape_of(next(tensor_args(node))))
        if pushed is None and not stays:
            return None
        at = pushed or at
    return whole if at.dim < 2 else None
