"""Bytes that a rank sends when a node of ringopt's operators runs, attention aside, as distributed/mesh.py counts them.

For the graphs that AOTAutograd makes: what a backward sends is a node there like any other.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.attention.layouts import layout_of
from ringopt.attention.rows import count
from ringopt.graph.nodes import op_name
from ringopt.ops.respread import plan_respread
from ringopt.ops.rows import Wanted, fetch_of

CPU = torch.device("cpu")


def sent_by(node: fx.Node, ranks: int, rank: int) -> int:
    """By `rank` of `ranks`. Rows of which the numbers are only known when the program runs count as none."""
    if not (isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ringopt"):
        return 0
    name, given = op_name(node), list[Any](node.args)
    if name in ("reduce_from_group", "reduce_bucket"):
        parts = given[:1] if name == "reduce_from_group" else given[0]
        return 2 * sum(map(size_of, parts)) * (ranks - 1) // ranks
    if name == "gather":
        _x, _dim, _outer, length, _inner, layout, _group = given
        return int(size_of(node) // length * longest(layout, length, ranks) * (ranks - 1))
    if name == "extreme":
        return size_of(node) * (ranks - 1)
    if name == "running_sum":
        _x, dim, length, _backwards, layout, _group = given
        return row_of(node, dim) * layout_of(layout, length, ranks).chunks_per_rank * (ranks - 1)
    return fetched(node, name, ranks, rank)


def fetched(node: fx.Node, name: str, ranks: int, rank: int) -> int:
    """Rows from rank to rank."""
    given: Any = node.args
    if name in ("fetch_rows", "return_rows"):
        x, dim, outer, length, inner, form, numbers, _local, layout, _group = given
        wanted = Wanted.of(form, numbers)
        plan = fetch_of(wanted, layout, length, ranks, rank, CPU)
        if name == "return_rows" and wanted.everywhere:
            return 0
        places = moved(plan.sends if name == "fetch_rows" else plan.receives) * int(outer * inner)
        return places * row_of(x, dim)
    if name == "respread":
        x, dim, old, new, _local, layout, _group = given
        return moved(plan_respread(tuple(old), tuple(new), layout, ranks, rank, CPU).sends) * row_of(x, dim)
    return 0


def moved(messages: Any) -> int:
    return sum(len(rows) for _peer, rows in messages)


def row_of(x: fx.Node, dim: int) -> int:
    """Bytes of one place of `dim`."""
    return size_of(x) // max(int(x.meta["val"].shape[dim]), 1)


def longest(layout: str, length: int, ranks: int) -> int:
    plan = layout_of(layout, length, ranks)
    return max(count(plan.ranges(rank)) for rank in range(ranks))


def size_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(prod(value.shape) * value.element_size())
