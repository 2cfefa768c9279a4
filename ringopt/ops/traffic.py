"""Bytes that a rank sends when a node of ringopt's operators runs, attention aside, as distributed/mesh.py counts them;
and bytes that the operator holds meanwhile.

For the graphs that AOTAutograd makes: what a backward sends is a node there like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ir.nodes import op_name
from ringopt.ops.all_to_all import bytes_turned
from ringopt.ops.fetch_rows import Wanted, fetch_of
from ringopt.ops.reshard import plan_respread

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sending:
    """What a rank sends for one operator, at the size that was traced and at others.

    how     "reduced": a value of `bytes`, by a ring; "gathered": rows of `bytes` each, of a sequence of `length`;
            "told": `bytes` to each other rank; "turned": `bytes` in all where there are `ranks`, a message between each
            two of them; "moved": `bytes` in all
    grows   whether `bytes` are in proportion to the sequence; rows that cross the edges of shards are not
    bound   that rows that are only known when the program runs are taken to lie all on this rank
    """

    how: Literal["reduced", "gathered", "told", "turned", "moved"]
    bytes: int
    length: int = 0
    layout: str = "contiguous"
    grows: bool = False
    bound: bool = False
    ranks: int = 0

    def at(self, ranks: int, scale: float = 1.0) -> int:
        size = round(self.bytes * scale) if self.grows else self.bytes
        if self.how == "reduced":
            return 2 * size * (ranks - 1) // ranks
        if self.how == "gathered":
            return size * layout_of(self.layout, max(round(self.length * scale), 1), ranks).most * (ranks - 1)
        if self.how == "turned":
            return size * (ranks - 1) * self.ranks**2 // ((self.ranks - 1) * ranks**2)
        return size * (ranks - 1) if self.how == "told" else size


def sendings(node: fx.Node, ranks: int, rank: int, rows: int) -> list[Sending]:
    """By `rank` of `ranks`, of which none has more than `rows` rows of the longest sequence: what has fewer numbers
    does not grow with it."""
    if not is_ours(node):
        return []
    name, given = op_name(node), list[Any](node.args)
    if name == "reduce_from_group":
        return [Sending("reduced", size_of(given[0]), grows=size_of(given[0]) > 8 * rows)]
    if name == "reduce_bucket":  # one message; those of parameters do not grow
        return [Sending("reduced", sum(map(size_of, given[0])))]
    if name == "gather":
        _x, _dim, _outer, length, _inner, layout, _group = given
        return [Sending("gathered", size_of(node) // length, length, layout)]
    if name == "extreme":
        return [Sending("told", size_of(node), grows=size_of(node) > 8 * rows)]
    if name == "running_sum":
        _x, dim, length, _backwards, layout, _group = given
        return [Sending("told", row_of(node, dim) * layout_of(layout, length, ranks).chunks_per_rank)]
    if name == "look_up_rows":  # who has them is not known; the rank that has most sends no more than if it had all
        return [Sending("told", size_of(node), bound=True)]
    sent = moved(node, name, ranks, rank)
    how: Any = "turned" if name == "turn" else "moved"
    return [Sending(how, sent, grows=4 * sent > size_of(node), ranks=ranks)] if sent else []


def is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ringopt"


def moved(node: fx.Node, name: str, ranks: int, rank: int) -> int:
    """Bytes of rows that change ranks."""
    given: Any = node.args
    if name in ("fetch_rows", "return_rows"):
        x, dim, outer, length, inner, form, numbers, _local, layout, _group = given
        wanted = Wanted.of(form, numbers)
        plan = fetch_of(wanted, layout, length, ranks, rank, CPU)
        if name == "return_rows" and wanted.everywhere:
            return 0
        places = rows_in(plan.sends if name == "fetch_rows" else plan.receives) * int(outer * inner)
        return places * row_of(x, dim)
    if name == "respread":
        x, dim, old, new, _local, *layouts, _group = given
        return rows_in(plan_respread(tuple(old), tuple(new), *layouts, ranks, rank, CPU).sends) * row_of(x, dim)
    if name == "turn":
        x, _dim, _old, _new_dim, new, _local, _old_layout, layout, _group = given
        return bytes_turned(size_of(x), new, layout, ranks, rank)
    return 0


def held_meanwhile(node: fx.Node, ranks: int) -> int:
    """Bytes that an operator which talks holds beside its operands and results, attention aside: messages. Gradients
    are given back when the message of their bucket is made, before there are sums."""
    if not is_ours(node):
        return 0
    name, given = op_name(node), list[Any](node.args)
    if name == "gather":
        x, dim, outer, length, _inner, layout, _group = given
        parts = size_of(node) // length * layout_of(layout, length, ranks).most * ranks
        apart = outer * prod(x.meta["val"].shape[:dim]) > 1 or length % ranks
        return int(parts + (parts // ranks if apart else 0))
    if name in ("fetch_rows", "return_rows", "look_up_rows", "add_to_rows", "respread", "turn"):
        return min(size_of(given[0]), size_of(node))
    return 0


def rows_in(messages: Any) -> int:
    return sum(len(rows) for _peer, rows in messages)


def row_of(x: fx.Node, dim: int) -> int:
    """Bytes of one place of `dim`."""
    return size_of(x) // max(int(x.meta["val"].shape[dim]), 1)


def size_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return int(prod(value.shape) * value.element_size())
