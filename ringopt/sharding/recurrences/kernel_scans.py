"""Recurrences that operators of other libraries compute, by their rules (`ringopt.rule(op, ScanRule(...))`), on
shards.

    o, last = mylib::delta_rule(q, k, v, g)   ->   o_rows, last, ... = sharded_kernel_scan(zeros, [q, k, v, g], ...)

By states: each rank runs the operator on its own tokens, from the state before them; what travels has the size of the
state. By heads, where its rule says that heads know nothing of each other: each rank runs it on all tokens of its own
heads, and what has tokens travels, there and back (`ringopt::turn`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.ir.nodes import arguments_of, shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.site import SiteInfo
from ringopt.ops import operators
from ringopt.rules.declare import ScanRule, declaration_of
from ringopt.scans.kernel import ScanKernel, state_of
from ringopt.sharding.recurrences.kernel_sites import tokens_of
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def begin_kernel_scans(sharder: Sharder, scans: Mapping[fx.Node, SiteInfo]) -> Iterator[tuple[fx.Node, Sharded]]:
    """What they want to have by tokens; they are placed so when the walk comes to them."""
    for node, info in scans.items():
        place = place_by_heads if info.strategy == "heads" else place_kernel_scan
        sharder.understood[node] = partial(place, sharder, node)
        xs, rows = tokens_of(node)
        yield from ((x, rows) for x in xs)


def place_kernel_scan(sharder: Sharder, node: fx.Node) -> None:
    """Over the ranks, with everything that reads it."""
    says, given = declaration_of(node), arguments_of(node)
    assert isinstance(says, ScanRule)
    kernel, (xs, rows) = ScanKernel.of(node, says), tokens_of(node)
    layout = sharder.ranks.layout(rows.length)
    sharder.reader = node
    made = sharder.over_ranks(
        operators.sharded_kernel_scan.default,
        node,
        None,
        "states",
        state=first_state(sharder, node, says),
        xs=[sharder.sharded(x, rows) for x in xs],
        shared=[sharder.copied(given[name]) for name in kernel.others],
        kernel=kernel.text,
        steps=rows.length,
        segments=chunks_per_rank(layout) * sharder.ranks.size,
        layout=layout,
    )
    sharder.values[node], sharder.placements[node] = made, None
    count = len(value_of(node))
    for part in list(node.users):
        at = part.args[1] % count
        # The last state stands behind the other results.
        place, found = (None, count - 1) if at == says.last else (rows, at - (at > says.last))
        sharder.set(part, sharder.call(operator.getitem, (made, found), part, place), place)


def place_by_heads(sharder: Sharder, node: fx.Node) -> None:
    """The operator as it is, on all tokens of this rank's heads; its results are back by tokens for all that reads
    them, but for the last state."""
    says, given = declaration_of(node), arguments_of(node)
    assert isinstance(says, ScanRule)
    xs, rows = tokens_of(node)
    sharder.reader = node

    def placed(name: str, x: fx.Node) -> fx.Node:
        heads = of_heads(x, says.heads[name]) if name in says.heads else None
        if heads is None or (heads.length == 1 and x in xs):
            return for_all_heads(sharder, x, rows) if x in xs else sharder.copied(x)
        # A demand for heads is not to climb: what tokens are made of would be computed whole.
        if x not in xs:
            return sharder.once(x, heads, partial(sharder.scatter, x, heads))
        turned = partial(sharder.turn, x, rows, heads, sharder.sharded(x, rows))
        return sharder.once(x, ("turned", heads), turned)

    local = [placed(name, x) if isinstance(x, fx.Node) else x for name, x in given.items()]
    made = sharder.call(node.target, local, node, None)
    sharder.values[node], sharder.placements[node] = made, None
    for part in list(node.users):
        at = part.args[1] % len(value_of(node))
        held = of_heads(part, says.heads[str(at)])
        sharder.set(part, sharder.call(operator.getitem, (made, at), part, held), held)
        if at != says.last:
            sharder.set(part, sharder.turn(part, held, rows), rows)


def for_all_heads(sharder: Sharder, x: fx.Node, rows: Sharded) -> fx.Node:
    """All tokens of what heads have in common; each rank's gradient is of its heads, so they are summed."""
    part = {"x": sharder.sharded(x, rows), **sharder.factors(rows), "layout": sharder.ranks.layout(rows.length)}
    whole = sharder.over_ranks(operators.gather.default, x, None, "whole", **part)
    learns = sharder.carries[x]
    return sharder.over_ranks(operators.copy_to_group.default, x, None, "copied", x=whole) if learns else whole


def of_heads(x: fx.Node, dim: int) -> Sharded:
    """Spread over its heads."""
    return Sharded(dim, 1, shape_of(x)[dim], 1)


def first_state(sharder: Sharder, node: fx.Node, says: ScanRule) -> fx.Node:
    """That of the call, or zeros."""
    given, last = arguments_of(node)[says.state], state_of(node, says)
    if given is not None:
        return sharder.replicated(given)
    return sharder.step(aten.zeros.default, list(last.shape), like=node, dtype=last.dtype, device=last.device)
