"""Sums over the sequence: local sums, added up over the ranks.

y = mean(x, 1)                  ->   y = div(reduce_from_group(sum(x_rows, 1)), n)
y = scatter_add(s, 1, i, x)     ->   y = add(s, reduce_from_group(scatter_add(zeros_like(s), 1, i_rows, x_rows)))
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import moving_dims
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import argument, is_tensor, named, op_name, shape_of, tensor_args, value_of
from ringopt.ir.symbolic_sizes import same
from ringopt.sharding.emit import Handler, Steps, dims_of, sequence_at, wide_dtype
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


def partial_sums(sharder: Sharder, node: fx.Node) -> bool:
    """A sum over the sharded dim is the sum of local sums; a mean divides it; a product contracts it.

    Sums of 16 bits travel in float32. A product gives its part in its own dtype, rounded once on each rank."""
    rule, operands = rule_of(node), list(tensor_args(node))
    if rule is None or not rule.summed:
        return False
    for i, arg in enumerate(operands):
        placement = sharder.placements.get(arg)
        wanted = rule.sums(i, placement) if placement is not None else None
        if wanted is None:
            continue
        step = Steps(sharder, node)
        args, kwargs = sharder.operands(node, wanted)
        total = step.total(_local_sum(step, args, kwargs))
        if op_name(node) == "mean":
            count = prod(shape_of(arg)[dim] for dim in dims_of(node))
            total = step(aten.div.Scalar, total, count)
        return step.done(total)
    return False


def _local_sum(step: Steps, args: Any, kwargs: Any) -> fx.Node:
    node = step.node
    if op_name(node) not in ("sum", "mean"):
        return step(node.target, *args, **kwargs)
    dims, keep = dims_of(node), bool(argument(node, 2, "keepdim", False))
    return step(aten.sum.dim_IntList, args[0], dims, keep, dtype=wide_dtype(value_of(node)))


def pooled_to_one(sharder: Sharder, node: fx.Node) -> bool:
    """adaptive_avg_pool to one row: the mean."""
    x, moving = node.args[0], moving_dims(op_name(node))
    dims = list(range(len(shape_of(x)) - moving, len(shape_of(x))))
    place = sharder.placements[x]
    if place is None or place.dim not in dims or list(named(node, "output_size")) != [1] * moving:
        return False
    step = Steps(sharder, node)
    total = step.total(step(aten.sum.dim_IntList, sharder.values[x], dims, True, dtype=wide_dtype(value_of(node))))
    return step.done(step(aten.div.Scalar, total, prod(shape_of(x)[dim] for dim in dims)))


def over_channels(sharder: Sharder, node: fx.Node) -> bool:
    """A convolution whose channels are the sequence (gMLP), not in groups. The bias is added as in `linear`."""
    x, weight, bias = (named(node, name) for name in ("input", "weight", "bias"))
    channels = len(shape_of(node)) - len(shape_of(weight)) + 1
    place = sequence_at(sharder, x, [channels])
    if place is None or named(node, "groups") != 1:
        return False
    step, moves = Steps(sharder, node), [named(node, name) for name in ("stride", "padding", "dilation")]
    filters = sharder.sharded(weight, place.at(1))
    total = step.total(step(node.target, sharder.values[x], filters, None, *moves))
    if is_tensor(bias):
        column = step(aten.reshape.default, sharder.replicated(bias), [-1, *[1] * (len(shape_of(weight)) - 2)])
        total = step(aten.add.Tensor, total, column)
    return step.done(total)


def linear(sharder: Sharder, node: fx.Node) -> bool:
    """Over the sequence, with a bias: it is added once, to the sum of what the ranks have."""
    x, weight, bias = node.args
    place = sequence_at(sharder, x, [-1])
    if place is None:
        return False
    step = Steps(sharder, node)
    columns = sharder.sharded(weight, place.at(len(shape_of(weight)) - 1))
    total = step.total(step(aten.linear.default, sharder.values[x], columns))
    return step.done(step(aten.add.Tensor, total, sharder.replicated(bias)))


def scattered(sharder: Sharder, node: fx.Node) -> bool:
    """scatter_add and index_add of rows (of windows, too): each rank adds up its own, into zeros."""
    into, dim, index = node.args[:3]
    x, by_row = named(node, "source" if op_name(node) == "index_add" else "src"), op_name(node) == "index_add"
    along, of_index = dim % len(shape_of(into)), 0 if by_row else dim % len(shape_of(into))
    place, at = sharder.placements[x], sharder.placements[index]
    found = place if place and place.dim == along else at.at(along) if at and at.dim == of_index else None
    held = sequence_at(sharder, into, [dim])
    if found is None or (held is None and sharder.placements[into] is not None):
        return False
    wanted = found.at(of_index)
    if not same(shape_of(index)[wanted.dim], found.size) or not same(shape_of(x)[along], found.size):
        return False
    step, wide = Steps(sharder, node), wide_dtype(value_of(node))
    zeros = step(aten.zeros.default, list(shape_of(into)), dtype=wide, device=value_of(node).device)
    rows = step(aten.to.dtype, sharder.sharded(x, found), wide, placement=found)
    scale = {"alpha": named(node, "alpha")} if by_row else {}
    total = step.total(step(node.target, zeros, dim, sharder.sharded(index, wanted), rows, **scale))
    if held is None:
        return step.done(step(aten.add.Tensor, sharder.values[into], total))
    mine = step.cut(total, held, placement=held)
    return step.done(step(aten.add.Tensor, sharder.values[into], mine, placement=held), held)


def like(sharder: Sharder, node: fx.Node) -> bool:
    """new_zeros and its kin take from their argument a dtype and a device: any rows will do."""
    sharder.reader = node
    rest, kwargs = fx.map_arg((node.args[1:], node.kwargs), sharder.replicated)
    args = (sharder.values[node.args[0]], *rest)
    sharder.set(node, sharder.call(node.target, args, node, None, dict(kwargs)), None)
    return True


SUMS: dict[str, Handler] = {
    "linear": linear,
    **dict.fromkeys(("scatter_add", "index_add"), scattered),
    **dict.fromkeys(("new_zeros", "new_ones", "new_empty", "new_full"), like),
}
