"""What the handlers of this package write with: the local form of one node, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.attention.layouts import layout_of
from ringopt.graph.nodes import shape_of, value_of
from ringopt.graph.placement import Sharded
from ringopt.graph.sharder import Sharder
from ringopt.ops.rows import Wanted

aten = torch.ops.aten

Handler = Callable[[Sharder, fx.Node], bool]


class Steps:
    """Emits the ops that stand in the place of `node`.

    A replicated value here is one with the same bits and the same complete gradient on every rank; it must pass through
    `beside` before it meets values that differ by rank.
    """

    def __init__(self, sharder: Sharder, node: fx.Node):
        self.sharder, self.node = sharder, node
        sharder.reader = node

    def __call__(self, op: Any, *args: Any, placement: Sharded | None = None, **kwargs: Any) -> fx.Node:
        return self.sharder.step(op, *args, like=self.node, placement=placement, **kwargs)

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self(aten.to.dtype, x, dtype, placement=x.meta["placement"])

    # ---- between the ranks -----------------------------------------------------------------------------------------
    def total(self, partial: fx.Node) -> fx.Node:
        """Partial sums to their sum, replicated."""
        return self(torch.ops.ringopt.reduce_from_group.default, partial, self.sharder.group)

    def parts(self, partial: fx.Node) -> fx.Node:
        """[ranks, ...]: what every rank has, replicated."""
        mine = self(aten.unsqueeze.default, partial, 0)
        ranks, group = self.sharder.ranks, self.sharder.group
        return self(torch.ops.ringopt.gather.default, mine, 0, 1, ranks, 1, "contiguous", group)

    def beside(self, x: fx.Node) -> fx.Node:
        """A replicated value for use beside sharded ones: their gradients of it are summed over the ranks."""
        return self(torch.ops.ringopt.copy_to_group.default, x, self.sharder.group)

    def fetch(self, x: fx.Node, place: Sharded, wanted: str, out: Sharded | None, of: fx.Node | None = None) -> fx.Node:
        """Rows of `x`, sharded as `place`, by a text of ringopt/ops/rows.py: sharded as `out`, or replicated;
        `of` is the node whose value they are, where nothing is left to do."""
        sharder, target = self.sharder, torch.ops.ringopt.fetch_rows.default
        local = len(Wanted.parse(wanted).rows(sharder.layout, sharder.ranks, sharder.rank))
        args = (x, *sharder.factors(place), wanted, local, sharder.layout, sharder.group)
        return sharder.call(target, args, of, out) if of is not None else self(target, *args, placement=out)

    def row_numbers(self, place: Sharded, rank: int, device: torch.device) -> fx.Node:
        """Which rows of the sequence this rank holds, shaped to broadcast along dim `place.dim` of `rank` dims."""
        sharder, length = self.sharder, place.length
        whole = self(aten.arange.default, length, device=device)
        local = sharder.rows_here(length)
        args = (whole, 0, 1, length, 1, local, sharder.layout, sharder.group)
        rows = self(torch.ops.ringopt.scatter.default, *args)
        return self(aten.reshape.default, rows, [-1 if dim == place.dim else 1 for dim in range(rank)])

    # ---- the result --------------------------------------------------------------------------------------------------
    def done(self, value: fx.Node, placement: Sharded | None = None, of: fx.Node | None = None) -> bool:
        """`value` is the node's (or that of an element of its tuple): cast to its dtype where it was computed wider."""
        node = of or self.node
        final = self.sharder.call(aten.to.dtype, (value, value_of(node).dtype), node, placement)
        self.sharder.set(node, final, placement)
        return True


def enough_rows(sharder: Sharder, length: int) -> bool:
    """Whether every chunk of the layout has a row."""
    return length >= layout_of(sharder.layout, length, sharder.ranks).chunks_per_rank * sharder.ranks


def sequence_at(sharder: Sharder, x: fx.Node, dims: Sequence[int]) -> Sharded | None:
    """The placement of `x` where `dims` is the one dim that is its sequence, with nothing else folded into it."""
    place = sharder.placements[x]
    if place is None or place.outer * place.inner > 1 or [dim % len(shape_of(x)) for dim in dims] != [place.dim]:
        return None
    return place


def wide_dtype(node: fx.Node) -> torch.dtype:
    """What partial sums are added up in: of 16 bits, float32, which also counts tokens without rounding."""
    dtype: torch.dtype = value_of(node).dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def dims_of(node: fx.Node, dims: Any) -> list[int]:
    """A dim argument as a list of dims from 0; None and [] are all dims of the first argument."""
    rank = len(shape_of(node.args[0]))
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))]
