"""Ops that mix all rows in a way of their own, and keep columns apart: computed column by column.

    y = sort(x, 1)   ->   columns = turn(x_rows, 1, (1, 24, 1), 2, (1, 8, 1))     # all rows of some of the columns
                          y_rows  = turn(sort(columns, 1), 2, (1, 8, 1), 1, (1, 24, 1))

Any op with a rule (ringopt/dims/rules.py) for another dim than that of the rows, one that ranks can share: batch, heads
or channels. What each rank computes is what one process computes, for fewer columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.fx as fx

from ringopt.dims.declared import DeclaredRule
from ringopt.dims.op_families import RUNNING, TRANSFORMS
from ringopt.dims.rule import Rule, ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import is_random, is_tensor, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open
from ringopt.ops import operators
from ringopt.sharding.emit import Steps, enough_rows, getitems
from ringopt.sharding.handlers.views import evenly
from ringopt.sharding.sharder import Sharder

# Those that nothing else here computes on shards: what they read above the first attention is spread for them.
MIXED = frozenset((*RUNNING, *TRANSFORMS, "sort", "argsort", "cummax", "cummin"))

Way = tuple[Sharded, Sequence[Sharded | None]]


def by_columns(sharder: Sharder, node: fx.Node) -> bool:
    """Where an operand is whole already, the op is computed whole with it; and one of many results, of which each
    would have to come back by itself."""
    rule, operands = rule_of(node), list(tensor_args(node))
    users = [node] if is_tensor(node) else getitems(node)
    if isinstance(rule, DeclaredRule) and users != [node]:
        return False  # its results may run along with different dims
    if rule is None or isinstance(rule, ViewRule) or len(rule.operands) != len(operands):
        return False
    if sharder.ranks.asks or is_random(node) or not users or len(users) > 2:
        return False
    held = [i for i, x in enumerate(operands) if sharder.placements[x] is not None]
    if held[:1] != [0]:  # rows written into a table that every rank has: it is to stay so
        return False
    if any(sharder.is_whole(operands[i]) for i in held):
        return False
    found = list(ways(sharder, rule, operands, held))
    if not found:
        return False
    out, wanted = max(found, key=lambda way: (evenly(sharder, way[0].length), way[0].length))
    rows, rank = sharder.placements[operands[held[0]]], len(shape_of(operands[held[0]]))
    assert rows is not None
    sharder.reader = node
    value, step = sharder.emit(node, rule, wanted, out), Steps(sharder, node)
    for user in users:
        columns = value if user is node else step.item(value, user.args[1])
        sharder.set(user, columns, out)
        sharder.converted[user, out] = columns  # for one more such op: the way home and back is dead code then
        home(sharder, user, out, rows, rank)
    return True


def ways(sharder: Sharder, rule: Rule, operands: Sequence[fx.Node], held: Sequence[int]) -> Iterator[Way]:
    """Each dim along which all operands that are spread can be spread instead: the placements of result and
    operands."""
    first = operands[held[0]]
    for dim, size in enumerate(shape_of(first)):
        at = Sharded(dim, 1, size, 1)
        if is_open(size) or not enough_rows(sharder, size):
            continue
        out = rule.push(held[0], at)
        wanted = rule.pull(out) if out is not None else None
        if out is None or wanted is None or not sharder.consistent(rule, wanted, out):
            continue
        if all(_changes_dim(sharder.placements[operands[i]], wanted[i]) for i in held):
            yield out, wanted


def _changes_dim(held: Sharded | None, wanted: Sharded | None) -> bool:
    return held is not None and wanted is not None and held.dim != wanted.dim


def home(sharder: Sharder, node: fx.Node, columns: Sharded, rows: Sharded, rank: int) -> None:
    """Back to rows, as the operand has them; of a result that has few or none, every rank has all."""
    sizes = shape_of(node)
    back = Sharded(rows.dim, 1, sizes[rows.dim], 1) if len(sizes) == rank else None
    if back is not None and back.size == rows.size:
        back = rows
    if back is not None and back.dim != columns.dim and enough_rows(sharder, back.length):
        sharder.set(node, sharder.turn(node, columns, back), back)
        return
    layout = sharder.ranks.layout(columns.length)
    step, given = Steps(sharder, node), {"x": sharder.values[node], **sharder.factors(columns), "layout": layout}
    whole = step.over_ranks(operators.gather.default, **given)
    sharder.set(node, whole, None)
