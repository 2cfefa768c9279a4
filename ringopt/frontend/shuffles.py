"""Elements that change places within a picture, as views of several dims, whose rules are known.

    pixel_shuffle(x, 2)   ->   reshape(permute(reshape(x, [B, C/4, 2, 2, H, W]), [0, 1, 4, 2, 5, 3]), [B, C/4, 2H, 2W])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.memory import laying_out
from ringopt.ir.nodes import emit, named, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open

aten = torch.ops.aten


def shuffle_by_views(graph: fx.Graph) -> None:
    """Pixels made of channels, and back (depth to space), channels that change places, and patches that do not overlap:
    views of several dims."""
    for node in [node for node in graph.nodes if node.target in SHUFFLES]:
        if found := SHUFFLES[node.target](node):
            split, order = found
            sizes = list(shape_of(node))
            spell_in_steps(
                node, [(aten.reshape.default, split), (aten.permute.default, order), (aten.reshape.default, sizes)]
            )


def spell_in_steps(node: fx.Node, steps: Iterable[tuple[Any, ...]]) -> None:
    """Puts operators one after the other in the place of one: each with what it is called with beside the tensor.
    Nothing is done where the result would lie otherwise in memory."""
    graph, x = node.graph, node.args[0]
    with graph.inserting_before(node):
        for target, *args in steps:
            x = emit(graph, target, (x, *args), node)
        for target, laid in laying_out(value_of(node).stride()):  # for views that are made of it
            x = emit(graph, target, (x, *laid), node)
    if value_of(x).stride() == value_of(node).stride():
        node.replace_all_uses_with(x)
        graph.erase_node(node)


Shuffle = tuple[list[Any], list[int]]  # how the operand's dims are split, and the order of these


def _in_pixels(node: fx.Node) -> Shuffle:
    (*lead, channels, rows, columns), r = shape_of(node.args[0]), node.args[1]
    at = len(lead)
    return [*lead, channels // r**2, r, r, rows, columns], [*range(at), at, at + 3, at + 1, at + 4, at + 2]


def _of_pixels(node: fx.Node) -> Shuffle:
    (*lead, channels, rows, columns), r = shape_of(node.args[0]), node.args[1]
    at = len(lead)
    return [*lead, channels, rows // r, r, columns // r, r], [*range(at), at, at + 2, at + 4, at + 1, at + 3]


def _in_groups(node: fx.Node) -> Shuffle:
    (batch, channels, *rest), groups = shape_of(node.args[0]), node.args[1]
    return [batch, groups, channels // groups, *rest], [0, 2, 1, *range(3, len(rest) + 3)]


def _in_patches(node: fx.Node) -> Shuffle | None:
    """nn.functional.unfold: [B, C, H, W] -> [B, C * h * w, patches]."""
    sizes, (h, w) = shape_of(node.args[0]), named(node, "kernel_size")
    if not _is_apart(node) or len(sizes) != 4 or any(map(is_open, sizes)) or sizes[2] % h or sizes[3] % w:
        return None
    return [*sizes[:2], sizes[2] // h, h, sizes[3] // w, w], [0, 1, 3, 5, 2, 4]


def _of_patches(node: fx.Node) -> Shuffle | None:
    """nn.functional.fold: the inverse."""
    sizes, (h, w), whole = shape_of(node.args[0]), named(node, "kernel_size"), named(node, "output_size")
    if not _is_apart(node) or len(sizes) != 3 or any(map(is_open, (*sizes, *whole))) or whole[0] % h or whole[1] % w:
        return None
    return [sizes[0], sizes[1] // (h * w), h, w, whole[0] // h, whole[1] // w], [0, 1, 4, 2, 5, 3]


def _is_apart(node: fx.Node) -> bool:
    """Whether windows lie side by side."""
    kernel, *others = (list(named(node, name)) for name in ("kernel_size", "stride", "padding", "dilation"))
    return others == [kernel, [0, 0], [1, 1]]


SHUFFLES: dict[Any, Callable[[fx.Node], Shuffle | None]] = {
    aten.pixel_shuffle.default: _in_pixels,
    aten.pixel_unshuffle.default: _of_pixels,
    aten.channel_shuffle.default: _in_groups,
    aten.im2col.default: _in_patches,
    aten.col2im.default: _of_patches,
}
