"""Ops that look at neighbouring rows: convolution, pooling, unfolding, running sums.

    y = conv1d(x, w, padding=1)   ->   chunks = each chunk of x_rows and a row around it     # sharding/seen_rows.py
                                       y_rows = cat([conv1d(chunk, w) for chunk in chunks])

Each output row is computed by the rank that the layout gives it to, from all rows that its window sees: so any stride
and dilation. A rank's chunks are computed one by one, because the rows at the end of one are no neighbours of those at
the beginning of the next. Of open length, or for any number of ranks, the graph cannot say where chunks end: a
convolution is then an operator of its own, that asks when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
import torch.fx as fx

from ringopt.dims.op_families import CONVOLUTIONS, POOLS, moving_dims
from ringopt.ir.nodes import is_tensor, named, op_name, shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open
from ringopt.ops import operators
from ringopt.ops.fetch_rows import Wanted, window_rows
from ringopt.sharding.emit import Handler, Steps, enough_rows, sequence_at, wide_dtype
from ringopt.sharding.handlers.conv_padding import CONVOLUTION_OF, sizes, unpadded, zeros_around
from ringopt.sharding.handlers.sums import over_channels, pooled_to_one
from ringopt.sharding.seen_rows import seen_rows
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten

AVERAGE_OF = {1: aten.avg_pool1d.default, 2: aten.avg_pool2d.default, 3: aten.avg_pool3d.default}


def convolution(sharder: Sharder, node: fx.Node) -> bool:
    """conv1d, conv2d and conv3d, with the sequence along one of the dims the kernel moves in, or along its channels."""
    weight, bias = (named(node, name) for name in ("weight", "bias"))
    moving = len(shape_of(weight)) - 2
    place = sharder.placements[node.args[0]]
    at = place.dim - (len(shape_of(node)) - moving) if place is not None else -1
    if place is None or at < 0:
        return over_channels(sharder, node)
    x, zeros = unpadded(sharder, node.args[0], place.dim)
    place, around = sharder.placements[x] or place, zeros_around(node, moving)
    stride, dilation = (sizes(named(node, name), moving) for name in ("stride", "dilation"))
    start, width = -around[at][0] - zeros, dilation[at] * (shape_of(weight)[2 + at] - 1) + 1
    wanted = seen_by(node, place.dim, stride[at], start, width)
    around[at] = 0, 0
    even = all(before == behind for before, behind in around)
    padding = [before if even else 0 for before, _ in around]
    if sharder.ranks.asks or is_open(wanted.pieces[0][0]):
        return even and of_open_length(sharder, node, x, place, wanted, Strides(stride, padding, dilation))

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        small = [sharder.copied(x) if is_tensor(x) else None for x in (weight, bias)]
        if not even:
            amounts = [zeros for pair in reversed(around) for zeros in pair]
            piece = step(aten.constant_pad_nd.default, piece, amounts, placement=out)
        args = (stride, padding, dilation, named(node, "groups"))
        return step(CONVOLUTION_OF[moving], piece, *small, *args, placement=out)

    return by_chunks(sharder, node, x, wanted, local)


@dataclass(frozen=True)
class Strides:
    """How a kernel moves, a number for each dim. There is no padding along the sequence: its rows are fetched."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]


def of_open_length(
    sharder: Sharder, node: fx.Node, x: fx.Node, place: Sharded, wanted: Wanted, moves: Strides
) -> bool:
    """A convolution of `x` in one operator."""
    weight, bias = (named(node, name) for name in ("weight", "bias"))
    out = Sharded(place.dim, 1, shape_of(node)[place.dim], 1)
    batched = len(shape_of(x)) == len(shape_of(weight))
    if place.outer * place.inner > 1 or not batched or not enough_rows(sharder, out.length):
        return False
    step = Steps(sharder, node)
    small = {"weight": sharder.copied(weight), "bias": sharder.copied(bias) if is_tensor(bias) else None}
    held = {"dim": place.dim, "length": place.length, "numbers": wanted.numbers}
    how = {"stride": moves.stride, "padding": moves.padding, "dilation": moves.dilation}
    made = {"local": sharder.rows(out.length), "layout": step.layouts(place, out), "groups": named(node, "groups")}
    given = {"x": sharder.values[x], **small, **held, **how, **made}
    return step.done(step.over_ranks(operators.convolve_rows.default, out, **given), out)


def pooling(sharder: Sharder, node: fx.Node) -> bool:
    """avg_pool and max_pool, with the sequence along one of the dims the windows move in. Rows outside it are as zeros
    to an average, and as -inf to a maximum; an average that counts no zeros around is divided by what it counts."""
    moving, maximum = moving_dims(op_name(node)), op_name(node).startswith("max")
    place = sharder.placements[node.args[0]]
    at = place.dim - (len(shape_of(node)) - moving) if place is not None else -1
    if place is None or at < 0:
        return False
    kernel, padding = (sizes(named(node, name), moving) for name in ("kernel_size", "padding"))
    stride = sizes(named(node, "stride") or kernel, moving)
    if (named(node, "ceil_mode") and not maximum) or (maximum and not _is_floating(node)):
        return False
    dilation = sizes(named(node, "dilation"), moving) if maximum else [1] * moving
    wanted = seen_by(node, place.dim, stride[at], -padding[at], dilation[at] * (kernel[at] - 1) + 1)
    other_padding = [0 if i == at else size for i, size in enumerate(padding)]
    rest = [dilation, *node.args[5:]] if maximum else [False, True, *node.args[6:]]

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(node.target, piece, kernel, stride, other_padding, *rest, placement=out)

    done = by_chunks(sharder, node, node.args[0], wanted, local, outside=-inf if maximum else None)
    if done and not maximum and any(padding) and not named(node, "count_include_pad") and not any(node.args[6:]):
        return _counted(sharder, node, (kernel, stride, padding))
    return done


def _counted(sharder: Sharder, node: fx.Node, windows: tuple[list[int], ...]) -> bool:
    """Divides averages that count zeros around by the part of each window that is inside."""
    step, place, value = Steps(sharder, node), sharder.placements[node], value_of(node)
    assert place is not None
    inside = shape_of(node.args[0])[-len(windows[0]) :]
    ones = step(aten.ones.default, [1, 1, *inside], dtype=value.dtype, device=value.device)
    batched = [1] * (len(shape_of(node)) - len(inside))
    part = step(aten.reshape.default, step(node.target, ones, *windows), [*batched, *shape_of(node)[-len(inside) :]])
    mine = step.cut(part, place)
    return step.done(step(aten.div.Tensor, sharder.values[node], mine, placement=place), place)


def _is_floating(node: fx.Node) -> bool:
    return bool(value_of(node).is_floating_point())


def adaptive_pooling(sharder: Sharder, node: fx.Node) -> bool:
    """adaptive_avg_pool to one row, or to sizes that divide what is there: windows of one size."""
    if pooled_to_one(sharder, node):
        return True
    moving, place = moving_dims(op_name(node)), sharder.placements[node.args[0]]
    before, after = (shape_of(x)[-moving:] for x in (node.args[0], node))
    if place is None or place.dim < len(shape_of(node)) - moving or any(map(is_open, (*before, *after))):
        return False
    if any(size % left for size, left in zip(before, after, strict=True)):
        return False
    kernel = [size // left for size, left in zip(before, after, strict=True)]
    op = AVERAGE_OF[moving]

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(op, piece, kernel, kernel, placement=out)

    width = kernel[place.dim - len(shape_of(node)) + moving]
    return by_chunks(sharder, node, node.args[0], seen_by(node, place.dim, width, 0, width), local)


def im2col(sharder: Sharder, node: fx.Node) -> bool:
    """nn.functional.unfold, of a sequence along the rows of the picture: a row of windows is made of some rows."""
    place, sample = sharder.placements[node.args[0]], shape_of(node.args[0])
    if place is None or place.dim != len(sample) - 2:
        return False
    kernel, dilation, padding, stride = (list(given) for given in node.args[1:5])
    width = dilation[0] * (kernel[0] - 1) + 1
    down, across = (
        (sample[i - 2] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(node.target, piece, kernel, dilation, [0, padding[1]], stride, placement=out)

    out = Sharded(len(shape_of(node)) - 1, 1, down, across)
    wanted = window_rows(down, stride[0], -padding[0], width)
    return by_chunks(sharder, node, node.args[0], wanted, local, out)


def unfold(sharder: Sharder, node: fx.Node) -> bool:
    """Windows along the sequence: each rank fetches the halo of its windows."""
    dim, size, stride = node.args[1:4]
    place = sequence_at(sharder, node.args[0], [dim])
    if place is None:
        return False

    def local(step: Steps, piece: fx.Node, out: Sharded) -> fx.Node:
        return step(aten.unfold.default, piece, dim, size, stride, placement=out)

    return by_chunks(sharder, node, node.args[0], seen_by(node, place.dim, stride, 0, size), local)


def seen_by(node: fx.Node, dim: int, stride: int, start: int, width: int) -> Wanted:
    """What the windows see that make the rows of `node` along `dim`."""
    return window_rows(shape_of(node)[dim], stride, start, width)


Local = Callable[[Steps, fx.Node, Sharded], fx.Node]


def by_chunks(
    sharder: Sharder,
    node: fx.Node,
    x: fx.Node,
    wanted: Wanted,
    local: Local,
    out: Sharded | None = None,
    outside: float | None = None,
) -> bool:
    """`node` is `local` of the rows of `x` that each chunk sees, one chunk after the other. It is sharded as `out`, if
    not along the same dim; rows outside the sequence are zeros, or all `outside`."""
    place = sharder.placements[x]
    if place is None:
        return False
    out = out or Sharded(place.dim, 1, shape_of(node)[place.dim], 1)
    length = out.length
    if place.outer * place.inner > 1 or not enough_rows(sharder, length) or sharder.ranks.asks or is_open(length):
        return False  # how many chunks, and of which sizes, stands in the graph
    step = Steps(sharder, node)
    pieces = seen_rows(step, sharder.values[x], place, wanted, replace(out, dim=place.dim, inner=1))
    rows = wanted.ranges(sharder.ranks.layout(length), sharder.ranks.size, sharder.ranks.rank)
    if outside is not None:
        pieces = [beyond(step, piece, place, at, outside) for piece, at in zip(pieces, rows, strict=True)]
    parts = [local(step, piece, out) for piece in pieces]
    if len(parts) == 1:
        return step.done(parts[0], out)
    sharder.set(node, sharder.call(aten.cat.default, (parts, out.dim), node, out), out)
    return True


def beyond(step: Steps, piece: fx.Node, place: Sharded, rows: range, outside: float) -> fx.Node:
    """Rows `rows` of a sequence, those that it has not being `outside`."""
    before, after = max(0, -rows.start), max(0, rows.stop - place.length)
    inside = step(aten.narrow.default, piece, place.dim, before, len(rows) - before - after)
    behind = len(shape_of(step.node)) - 1 - place.dim
    return step(aten.constant_pad_nd.default, inside, [0, 0] * behind + [before, after], outside)


def cumsum(sharder: Sharder, node: fx.Node) -> bool:
    """A local cumulative sum plus the sums of the chunks before, in the dtype of the accumulator."""
    place = sequence_at(sharder, node.args[0], [named(node, "dim")])
    if place is None:
        return False
    step = Steps(sharder, node)
    x = step(aten.to.dtype, sharder.values[node.args[0]], wide_dtype(value_of(node)), placement=place)
    held = {"dim": place.dim, "length": place.length, "layout": sharder.ranks.layout(place.length)}
    return step.done(step.over_ranks(operators.running_sum.default, place, x=x, **held, backwards=False), place)


NEIGHBOURS: dict[str, Handler] = {
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(POOLS, pooling),
    **{f"adaptive_avg_pool{moving}d": adaptive_pooling for moving in AVERAGE_OF},
    "im2col": im2col,
    "unfold": unfold,
    "cumsum": cumsum,
}
