"""Normalisation layers whose statistics run over the sequence.

    y = batch_norm(x, w, b, ...)   ->   mean   = reduce_from_group(sum(x_rows, [0, 2])) / count
                                        c_rows = x_rows - copy_to_group(mean)
                                        var    = reduce_from_group(sum(c_rows ** 2, [0, 2])) / count
                                        y_rows = c_rows * copy_to_group(rsqrt(var + eps)) * w + b

Running statistics are those of the whole batch, so they stay equal on all ranks.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ir.nodes import is_tensor, named, shape_of
from ringopt.sharding.emit import Handler
from ringopt.sharding.handlers.norms import Statistics, statistics
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def batch_norm(sharder: Sharder, node: fx.Node) -> bool:
    """In training: statistics of each channel. (In evaluation it works token by token: dims/rules.py.)"""
    running = [named(node, name) for name in ("running_mean", "running_var")]
    if not named(node, "training") or any(is_tensor(old) and old.op != "placeholder" for old in running):
        return False
    rank = len(shape_of(node))
    step = statistics(sharder, node, [dim for dim in range(rank) if dim != 1])
    if step is None:
        return False
    mean, centered, squares = step.moments()
    if is_tensor(running[0]):
        follow(step, running, (mean, squares))
    y = _normalized(step, centered, squares)
    return step.done(affine(step, y, [-1 if dim == 1 else 1 for dim in range(rank)]), step.place)


def follow(step: Statistics, running: list[fx.Node], found: tuple[fx.Node, fx.Node]) -> None:
    """running <- (1 - momentum) * running + momentum * (mean, unbiased variance)"""
    momentum = named(step.node, "momentum")
    for old, new, count in zip(running, found, (1, max(0, step.count - 1)), strict=True):
        flat = step(aten.reshape.default, step(aten.detach.default, new), [-1])
        value = step(aten.div.Scalar, flat, count)
        before = step(aten.mul.Scalar, step.sharder.values[old], 1 - momentum)
        step(aten.copy_.default, step.sharder.values[old], step(aten.add.Tensor, before, value, alpha=momentum))


def _normalized(step: Statistics, centered: fx.Node, squares: fx.Node) -> fx.Node:
    variance = step(aten.div.Scalar, squares, step.count)
    scale = step(aten.rsqrt.default, step(aten.add.Scalar, variance, named(step.node, "eps")))
    return step.local(aten.mul.Tensor, centered, step.copied(scale))


def affine(step: Statistics, y: fx.Node, sizes: list[int]) -> fx.Node:
    """times weight, plus bias, where the layer has them; both are viewed as `sizes`."""
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if is_tensor(named(step.node, name)):
            whole = step.sharder.copied(named(step.node, name))
            y = step.local(op, y, step(aten.reshape.default, whole, sizes))
    return y


def group_norm(sharder: Sharder, node: fx.Node) -> bool:
    """Statistics of the groups are summed over the ranks."""
    return by_groups(sharder, node, named(node, "num_groups"))


def instance_norm(sharder: Sharder, node: fx.Node) -> bool:
    """As group_norm with a group a channel; not with running statistics."""
    if not named(node, "use_input_stats") or is_tensor(named(node, "running_mean")):
        return False
    return by_groups(sharder, node, shape_of(node)[1])


def by_groups(sharder: Sharder, node: fx.Node, groups: int) -> bool:
    """Statistics of each group of channels of each sample: [N, C, ...] is viewed as [N, groups, C / groups, ...]."""
    shape, place = shape_of(node), sharder.placements[node.args[0]]
    step = statistics(sharder, node, list(range(1, len(shape)))) if place is not None and place.dim > 1 else None
    if step is None or place is None:
        return False
    rest = [-1 if dim == place.dim else size for dim, size in enumerate(shape)][2:]
    step.x = step.local(aten.reshape.default, step.x, [shape[0], groups, shape[1] // groups, *rest])
    step.dims, step.count = list(range(2, len(shape) + 1)), step.count // groups
    _mean, centered, squares = step.moments()
    y = step.local(aten.reshape.default, _normalized(step, centered, squares), [*shape[:2], *rest])
    return step.done(affine(step, y, [-1 if dim == 1 else 1 for dim in range(len(shape))]), place)


def layer_norm(sharder: Sharder, node: fx.Node) -> bool:
    """Over the sequence too: weight and bias are sharded with it."""
    rank, count = len(shape_of(node)), len(named(node, "normalized_shape"))
    step = statistics(sharder, node, list(range(rank - count, rank)))
    if step is None:
        return False
    _mean, centered, squares = step.moments()
    y, place = _normalized(step, centered, squares), step.place.at(step.place.dim - (rank - count))
    for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if is_tensor(named(node, name)):
            y = step.local(op, y, sharder.sharded(named(node, name), place))
    return step.done(y, step.place)


LAYERS: dict[str, Handler] = {
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "layer_norm": layer_norm,
}
