"""Branches of what attention reads, that nobody demands in rows: where all of them are made of values every rank has.

    q, k, v = qkv(x).chunk(3, -1)                    # rows of q are wanted, for y is added to rows
    y = softmax(q @ (E @ k).mT) @ (E @ v)       ->   x is cut: E @ k is a sum of local sums

A demand climbs from attention to the inputs and leaves what stands beside its way as it is, computed whole on every
rank. Where that is much of the work, the inputs are cut instead, and everything that is made of their rows is rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch.fx as fx

from ringopt.ir.nodes import tensor_args
from ringopt.ir.placement import Sharded
from ringopt.sharding.handlers.slots import flops, pushed
from ringopt.sharding.sharder import Sharder

LEAST_PART = 0.05  # of the graph's FLOPs, from which on what nobody demands is worth a cut


def branches(
    sharder: Sharder, bases: Mapping[fx.Node, Sharded], sites: Iterable[fx.Node], demanded: Collection[fx.Node]
) -> dict[fx.Node, Sharded]:
    """Those of `bases`, values that every rank has and of which rows are demanded, that are to be cut. `sites`: what
    gives rows; `demanded`: what is computed in rows on the way there."""
    if not bases:
        return {}
    nodes = list(next(iter(bases)).graph.nodes)
    whole = read_whole(nodes, set(sites), demanded)
    least = LEAST_PART * sum(map(flops, nodes))
    if sum(map(flops, whole)) <= least:
        return {}
    rows = made_of(sharder, nodes, bases)
    gained = [node for node in rows if node in whole and flops(node)]
    return above(gained, rows, bases) if sum(map(flops, gained)) > least else {}


def read_whole(nodes: list[fx.Node], sites: set[fx.Node], demanded: Collection[fx.Node]) -> set[fx.Node]:
    """What has to be whole, for it is read by what is neither demanded in rows nor made of the rows that sites give."""
    spread = set(sites)
    for node in nodes:
        if not spread.isdisjoint(node.all_input_nodes):
            spread.add(node)
    whole = set[fx.Node]()
    for node in reversed(nodes):
        if node in spread or node.op == "output":
            continue
        if node not in demanded or any(user in whole for user in node.users):
            whole.add(node)
    return whole


def made_of(sharder: Sharder, nodes: list[fx.Node], bases: Mapping[fx.Node, Sharded]) -> dict[fx.Node, Sharded]:
    """`bases`, and what is made of rows of them token by token, with nothing else but what every rank has."""
    rows, worked = dict(bases), set[fx.Node]()
    for node in nodes:
        parts = [x for x in tensor_args(node) if x in rows]
        out = pushed(sharder, node, parts[0], rows[parts[0]]) if parts and node not in rows else None
        if out is not None and worked.isdisjoint(x for x in tensor_args(node) if x not in rows):
            rows[node] = out
        elif flops(node) or not worked.isdisjoint(node.all_input_nodes):
            worked.add(node)
    return rows


def above(
    found: Iterable[fx.Node], rows: Mapping[fx.Node, Sharded], bases: Mapping[fx.Node, Sharded]
) -> dict[fx.Node, Sharded]:
    """The bases that `found` are made of."""
    pending, seen = list(found), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending += [x for x in node.all_input_nodes if x in rows]
    return {node: at for node, at in bases.items() if node in seen}
