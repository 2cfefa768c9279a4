"""Pairs of tokens that are no attention site: what is spread for their rows.

    scores = matmul(q, k.mT)   ->   scores_rows = matmul(q_rows, gather(k_rows).mT)

Queries are demanded in rows. Keys, and values that are weighed, are made in rows and gathered, also above the first
site, where every rank could make all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.ir.nodes import op_name, tensor_args
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import is_open
from ringopt.recognize.row_pairs import Pairs
from ringopt.sharding.behind_breaks import WEIGHTY
from ringopt.sharding.emit import enough_rows
from ringopt.sharding.grains import inside_chunks
from ringopt.sharding.handlers.demands import Demand, climb
from ringopt.sharding.ranks import two_rows_each
from ringopt.sharding.sharder import Sharder
from ringopt.sharding.sites import operands


def enough_queries(pairs: Pairs, layouts: Layouts, ranks: int) -> bool:
    """Whether every chunk of the layout has a query. None has of pairs inside of the chunks of a scan, which ranks hold
    whole. Where the length is open every rank has two, by a guard."""
    length, layout = pairs.rows.length, layouts.of(pairs.rows.length)
    if inside_chunks(pairs.queries, pairs.rows, layouts.grains):
        return False
    if is_open(length):
        return bool(length >= 2 * ranks) and two_rows_each(length, layout, ranks)
    return length >= chunks_per_rank(layout) * ranks


def wanted_by(pairs: Collection[Pairs]) -> Iterator[Demand]:
    """What pairs want to have in rows."""
    for each in pairs:
        yield each.queries, each.rows
        yield from each.others


def spread_pairs(
    sharder: Sharder, pairs: Mapping[fx.Node, Pairs], sites: Mapping[fx.Node, SiteInfo]
) -> dict[fx.Node, Sharded]:
    """What is to be spread as soon as it is there. Tells the sharder which operand of a product gives it its rows, and
    what of it is gathered for whoever reads all of it."""
    found = own_keys(sharder, sites)
    for product, each in pairs.items():
        sharder.leading[product] = each.queries
        for other, at in each.others:
            if enough_rows(sharder, at.length) and made_in_products(sharder, other, at):
                found[other] = at
                sharder.in_parts.add(other)
    for each in pairs.values():
        if enough_rows(sharder, each.rows.length):
            found[each.queries] = each.rows
            sharder.in_parts.discard(each.queries)
    return found


def own_keys(sharder: Sharder, sites: Mapping[fx.Node, SiteInfo]) -> dict[fx.Node, Sharded]:
    """Of the keys and values that each query has for itself, what is made of pairs: it is spread by queries as soon as
    it is there. Else the keys that it is added to, fewer numbers by far, would say by which tokens."""
    found = dict[fx.Node, Sharded]()
    for site in (node for node, info in sites.items() if info.by_heads):
        pending = list(operands(site, sites[site]))
        while pending:
            node, place = pending.pop()
            above = (climb(sharder, node, place) if node.op == "call_function" else None) or []
            if len(above) == len(list(tensor_args(node))):
                pending += above
            else:
                found |= dict(above)
    return found


def made_in_products(sharder: Sharder, node: fx.Node, place: Sharded) -> bool:
    """Whether rows of a value are made of rows in a product, or something like it: else every rank had better make all
    of it than have it sent."""
    pending, seen = [(node, place)], set[fx.Node]()
    while pending:
        here, at = pending.pop()
        above = climb(sharder, here, at) if here.op == "call_function" and here not in seen else None
        if above and op_name(here) in WEIGHTY:
            return True
        seen.add(here)
        pending += above or []
    return False
