"""Padding in front of convolutions, and the rows of these that nobody reads: neither is made, or sent.

    y = conv1d(x, w, padding=3)[..., :n]    ->    y = conv1d(pad(x, (3, 0)), w)      # cut_convolutions
    y = conv1d(pad(x, (3, 0)), w)           ->    windows that begin three rows before x    # unpadded

Both are how causal convolutions are written. A sequence of n + 3 rows is spread otherwise than one of n: to come back
to the layout of n, all that the convolution gives would be copied, and rows would travel.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.dims.op_families import CONVOLUTIONS
from ringopt.ir.nodes import emit, is_aten, named, op_name, shape_of
from ringopt.ir.symbolic_sizes import is_open, plain, same
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten

# By the number of dims that the kernel moves in. ("same" padding is an overload of its own.)
CONVOLUTION_OF = {1: aten.conv1d.default, 2: aten.conv2d.default, 3: aten.conv3d.default}

Cut = tuple[int, int, Any]  # the dim, the first row, and how many


def cut_convolutions(graph: fx.Graph) -> None:
    """Where all readers of a convolution read the same of its rows, it gives these alone."""
    for node in list(graph.nodes):
        if is_aten(node) and op_name(node) in CONVOLUTIONS:
            cut = read_of(node)
            if cut is not None:
                give_alone(graph, node, *cut)


def read_of(node: fx.Node) -> Cut | None:
    """Which rows all of its readers cut; None where some read others, or they cut none."""
    cuts = list(map(cut_by, node.users))
    if not cuts or cuts[0] is None or any(cut is None or cut[:2] != cuts[0][:2] for cut in cuts):
        return None
    dim, first, count = cuts[0]
    return (dim, first, count) if all(same(cut[2], count) for cut in cuts if cut is not None) else None


def cut_by(node: fx.Node) -> Cut | None:
    """What a slice is that counts from the start."""
    if node.target is not aten.slice.Tensor or named(node, "step") != 1:
        return None
    dim, first = named(node, "dim") % len(shape_of(node)), named(node, "start") or 0
    return (dim, first, shape_of(node)[dim]) if isinstance(first, int) and first >= 0 else None


def give_alone(graph: fx.Graph, node: fx.Node, dim: int, first: int, count: Any) -> None:
    """Pads by what the windows of these rows see beyond the input, so that they are all there is."""
    x, weight = named(node, "input"), named(node, "weight")
    moving = len(shape_of(weight)) - 2
    at, around = dim - (len(shape_of(node)) - moving), zeros_around(node, moving)
    stride, dilation = (sizes(named(node, name), moving) for name in ("stride", "dilation"))
    others = [zeros for i, zeros in enumerate(around) if i != at]
    if at < 0 or stride[at] != 1 or any(before != behind for before, behind in others):
        return
    left = around[at][0] - first
    right = plain(count + dilation[at] * (shape_of(weight)[2 + at] - 1) - left - shape_of(x)[dim])
    if is_open(right) or min(left, right) < 0:
        return
    with graph.inserting_before(node):
        behind = len(shape_of(node)) - 1 - dim
        amounts = [0, 0] * behind + [left, int(right)]
        padded = emit(graph, aten.constant_pad_nd.default, (x, amounts, 0), node) if any(amounts) else x
        padding = [0 if i == at else zeros for i, (zeros, _) in enumerate(around)]
        made = OpCall.of(node).replace(input=padded, padding=padding).arguments
        new = OpCall.to(CONVOLUTION_OF[moving], **made).emit(graph, node)
    for reader in list(node.users):
        reader.replace_all_uses_with(new)


def unpadded(sharder: Sharder, x: fx.Node, dim: int) -> tuple[fx.Node, int]:
    """What `x` is with zeros around it, along the sequence `dim` alone, and how many stand before it."""
    padded = x.target in (aten.constant_pad_nd.default, aten.pad.default) and not named(x, "value")
    if not padded or (op_name(x) == "pad" and named(x, "mode") != "constant"):
        return x, 0
    inner, amounts = x.args[0], list(named(x, "pad"))
    place, at = sharder.placements[inner], 2 * (len(shape_of(x)) - 1 - dim)
    around = amounts[at : at + 2]
    alone = not any(amounts[:at] + amounts[at + 2 :]) and len(around) == 2 and min(around) >= 0
    return (inner, around[0]) if alone and place is not None and place.dim == dim else (x, 0)


def sizes(given: Any, count: int) -> list[int]:
    """An argument of an op with `count` spatial dims: a single number holds for all of them."""
    return list(given) * count if len(given) == 1 else list(given)


def zeros_around(node: fx.Node, moving: int) -> list[tuple[int, int]]:
    """How many zeros stand before the first row and behind the last, in each dim the kernel moves in."""
    padding = named(node, "padding")
    if padding == "valid":
        return [(0, 0)] * moving
    if padding != "same":
        return [(zeros, zeros) for zeros in sizes(padding, moving)]
    kernel, dilation = shape_of(named(node, "weight"))[2:], sizes(named(node, "dilation"), moving)
    around = [apart * (size - 1) for apart, size in zip(dilation, kernel, strict=True)]
    return [(zeros // 2, zeros - zeros // 2) for zeros in around]
