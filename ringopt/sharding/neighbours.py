"""Ops that look at neighbouring rows: convolution, pooling, unfolding, running sums.

    y = conv1d(x, w, padding=1)   ->   seen   = fetch_rows(x_rows, "halo 11:1:-1:3")    # each chunk and a row around it
                                       y_rows = cat([conv1d(chunk, w) for chunk in split(seen)])

Each output row is computed by the rank that the layout gives it to, from all rows that its window sees: so any stride
and dilation. A rank's chunks are computed one by one, because the rows at the end of one are no neighbours of those at
the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

import ringopt.ops.prefix  # noqa: F401  (registers the operator)
from ringopt.graph.nodes import is_tensor, named, op_name, shape_of, value_of
from ringopt.graph.placement import Sharded
from ringopt.graph.sharder import Sharder
from ringopt.graph.sizes import is_open
from ringopt.ops.rows import Wanted, windows
from ringopt.sharding.steps import Handler, Steps, enough_rows, sequence_at, wide_dtype

aten = torch.ops.aten


def convolution(sharder: Sharder, node: fx.Node) -> bool:
    """conv1d and conv2d, with the sequence along one of the dims the kernel moves in."""
    weight, bias = (named(node, name) for name in ("weight", "bias"))
    moving = len(shape_of(weight)) - 2
    place = sharder.placements[node.args[0]]
    at = place.dim - (len(shape_of(node)) - moving) if place is not None else -1
    before = padding_before(node, moving)
    if place is None or at < 0 or before is None:
        return False
    stride, dilation = (sizes(named(node, name), moving) for name in ("stride", "dilation"))
    wanted = seen_by(node, place.dim, stride[at], -before[at], dilation[at] * (shape_of(weight)[2 + at] - 1) + 1)
    padding = [0 if i == at else size for i, size in enumerate(before)]
    op = aten.conv1d.default if moving == 1 else aten.conv2d.default

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        small = [sharder.beside(x) if is_tensor(x) else None for x in (weight, bias)]
        return step(op, piece, *small, stride, padding, dilation, named(node, "groups"), placement=out)

    return by_chunks(sharder, node, place, wanted, local)


def sizes(given: Any, count: int) -> list[int]:
    return list(given) * count if len(given) == 1 else list(given)


def padding_before(node: fx.Node, moving: int) -> list[int] | None:
    """Zeros before the first row, in each dim the kernel moves in; None where other dims are padded unevenly."""
    padding = named(node, "padding")
    if padding == "valid":
        return [0] * moving
    if padding != "same":
        return sizes(padding, moving)
    kernel, dilation = shape_of(node.args[1])[2:], sizes(named(node, "dilation"), moving)
    return [dilation[0] * (kernel[0] - 1) // 2] if moving == 1 else None


def pooling(sharder: Sharder, node: fx.Node) -> bool:
    """avg_pool1d and max_pool1d, where padding is as good as zeros in the rows."""
    place = sequence_at(sharder, node.args[0], [-1])
    kernel, padding = named(node, "kernel_size"), named(node, "padding")
    stride = named(node, "stride") or kernel
    zeros = not any(padding) or (op_name(node) == "avg_pool1d" and named(node, "count_include_pad"))
    if place is None or named(node, "ceil_mode") or not zeros:
        return False
    dilation = named(node, "dilation") if op_name(node) == "max_pool1d" else [1]
    wanted = seen_by(node, place.dim, stride[0], -padding[0], dilation[0] * (kernel[0] - 1) + 1)
    rest = [dilation] if op_name(node) == "max_pool1d" else []

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(node.target, piece, kernel, stride, [0], *rest, placement=out)

    return by_chunks(sharder, node, place, wanted, local)


def unfold(sharder: Sharder, node: fx.Node) -> bool:
    dim, size, stride = node.args[1:4]
    place = sequence_at(sharder, node.args[0], [dim])
    if place is None:
        return False

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(aten.unfold.default, piece, dim, size, stride, placement=out)

    return by_chunks(sharder, node, place, seen_by(node, place.dim, stride, 0, size), local)


def seen_by(node: fx.Node, dim: int, stride: int, start: int, width: int) -> Wanted:
    """What the windows see that make the rows of `node` along `dim`."""
    return windows(shape_of(node)[dim], stride, start, width)


Local = Callable[[Steps, fx.Node, Sharded], fx.Node]


def by_chunks(sharder: Sharder, node: fx.Node, place: Sharded, wanted: Wanted, local: Local) -> bool:
    """`node` is `local` of the rows that each chunk sees, one chunk after the other."""
    length = shape_of(node)[place.dim]
    if place.outer * place.inner > 1 or not enough_rows(sharder, length) or sharder.asks or is_open(length):
        return False  # how many chunks, and of which sizes, stands in the graph
    out, step = Sharded(place.dim, 1, length, 1), Steps(sharder, node)
    seen = step.fetch(sharder.values[node.args[0]], place, wanted, out)
    counts = [len(rows) for rows in wanted.ranges(sharder.layout(length), sharder.ranks, sharder.rank)]
    chunks = step(aten.split_with_sizes.default, seen, counts, place.dim)
    pieces = [local(step, step.item(chunks, i), out) for i in range(len(counts))]
    sharder.set(node, sharder.call(aten.cat.default, (pieces, place.dim), node, out), out)
    return True


def cumsum(sharder: Sharder, node: fx.Node) -> bool:
    place = sequence_at(sharder, node.args[0], [named(node, "dim")])
    if place is None:
        return False
    step = Steps(sharder, node)
    x = step(aten.to.dtype, sharder.values[node.args[0]], wide_dtype(value_of(node)), placement=place)
    args = (x, place.dim, place.length, False, sharder.layout(place.length), sharder.group)
    return step.done(step(torch.ops.ringopt.running_sum.default, *args, placement=place), place)


NEIGHBOURS: dict[str, Handler] = {
    **dict.fromkeys(("conv1d", "conv2d"), convolution),
    **dict.fromkeys(("avg_pool1d", "max_pool1d"), pooling),
    "unfold": unfold,
    "cumsum": cumsum,
}
