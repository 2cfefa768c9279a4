"""Patches of an image as rows: a convolution whose stride is its kernel is a linear layer, patch by patch.

    y = conv2d(image, w, stride=P).flatten(2)   ->   patches = image cut into P x P, one a row
                                                     y_rows  = linear(scatter(patches), w).transpose(1, 2)

(Dosovitskiy et al. 2021, An Image is Worth 16x16 Words, section 3.1.) Rows of patches come from a whole image, so no
demand climbs over the convolution by a rule; they are cut here, where they first are a sequence.
"""

from __future__ import annotations

from math import prod

import torch
import torch.fx as fx

from ringopt.dims.op_families import CONVOLUTIONS, RESHAPES
from ringopt.ir.nodes import named, op_name, shape_of
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open
from ringopt.sharding.emit import Steps
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def patches(sharder: Sharder, node: fx.Node, at: Sharded) -> fx.Node:
    """The rows `at` of the reshape `node` that makes a sequence of what a convolution of patches gives."""
    conv, step, rows_at = node.args[0], Steps(sharder, node), Sharded(1, 1, at.length, 1)
    rows = step.cut(cut(step, conv), rows_at, placement=rows_at)
    weight, bias = named(conv, "weight"), named(conv, "bias")
    flat = step(aten.reshape.default, sharder.copied(weight), [shape_of(conv)[1], -1])
    y = step(aten.linear.default, rows, flat, sharder.copied(bias) if bias is not None else None, placement=rows_at)
    return sharder.call(aten.transpose.int, (y, 1, 2), node, at)


def are_patches(node: fx.Node, at: Sharded) -> bool:
    """Whether the rows `at` of `node` are the patches that a convolution makes, one after the other."""
    conv = node.args[0] if op_name(node) in RESHAPES else None
    if not isinstance(conv, fx.Node) or not _is_of_patches(conv):
        return False
    sizes, count = shape_of(conv), prod(shape_of(conv)[2:])
    return list(shape_of(node)) == [*sizes[:2], count] and at == Sharded(2, 1, count, 1)


def _is_of_patches(conv: fx.Node) -> bool:
    if op_name(conv) not in CONVOLUTIONS:
        return False
    kernel = shape_of(named(conv, "weight"))[2:]
    sizes = (*shape_of(conv.args[0]), *shape_of(conv), *kernel)
    if any(map(is_open, sizes)) or len(shape_of(conv)) != 2 + len(kernel) or named(conv, "groups") != 1:
        return False
    padding = named(conv, "padding")
    apart = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    return apart and each(named(conv, "stride"), kernel) == kernel and set(named(conv, "dilation")) == {1}


def each(numbers: list[int], dims: tuple[int, ...]) -> tuple[int, ...]:
    """One a dim, where one may be given for all."""
    return tuple(numbers) * len(dims) if len(numbers) == 1 else tuple(numbers)


def cut(step: Steps, conv: fx.Node) -> fx.Node:
    """[B, patches, channels * patch] of a whole image; what is left over at its far sides is no part of a patch."""
    x, kernel, counts = step.sharder.replicated(conv.args[0]), shape_of(named(conv, "weight"))[2:], shape_of(conv)[2:]
    batch, channels = shape_of(conv.args[0])[:2]
    for dim, (count, size) in enumerate(zip(counts, kernel, strict=True), start=2):
        x = step(aten.slice.Tensor, x, dim, 0, count * size)
    split = [size for pair in zip(counts, kernel, strict=True) for size in pair]
    x = step(aten.reshape.default, x, [batch, channels, *split])
    places = range(2, 2 + len(split))
    x = step(aten.permute.default, x, [0, *places[::2], 1, *places[1::2]])
    return step(aten.reshape.default, x, [batch, prod(counts), channels * prod(kernel)])
