"""Losses over the sequence: sums and what they are divided by are reduced apart.

    loss = cross_entropy(logits, labels)   ->   local  = cross_entropy(logits_rows, labels_rows, reduction="sum")
                                                count  = sum(labels_rows != ignore_index)
                                                loss   = reduce_from_group(local) / reduce_from_group(count)

A mean of local means would weigh tokens wrongly: ranks hold unequally many rows, and count unequally many of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.rule import Dims, Rule, aligned
from ringopt.ir.nodes import is_tensor, named, op_name, shape_of, tensor_args, value_of
from ringopt.ir.placement import Sharded
from ringopt.sharding.emit import Handler, Steps, has_argument, wide_dtype
from ringopt.sharding.sharder import Sharder
from ringopt.torch_compat.schema import schema_of

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2  # reductions of ATen's losses


# ---- against classes -----------------------------------------------------------------------------------------------
def classification(sharder: Sharder, node: fx.Node) -> bool:
    """cross_entropy_loss and nll_loss_nd, sharded over tokens; the target holds class indices or probabilities."""
    logits, target = node.args[:2]
    placement = _placement_of_logits(sharder, node)
    if placement is None or placement.dim == _class_dim(node):
        return False
    step = Steps(sharder, node)
    rows = placement if _of_probabilities(node) else placement.at(placement.dim - (placement.dim > _class_dim(node)))
    here, wanted = sharder.sharded(logits, placement), sharder.sharded(target, rows)
    weight = sharder.copied(named(node, "weight")) if is_tensor(named(node, "weight")) else None
    options = [named(node, "ignore_index")]
    if op_name(node) == "cross_entropy_loss":
        options.append(named(node, "label_smoothing"))
    reduction = named(node, "reduction")
    if reduction == NONE:
        out = placement.at(placement.dim - (placement.dim > _class_dim(node)))
        sharder.set(node, step(node.target, here, wanted, weight, NONE, *options, placement=out), out)
        return True
    loss = step(node.target, here, wanted, weight, SUM, *options)
    loss = step.total(step.cast(loss, wide_dtype(value_of(node))))
    if reduction == MEAN:
        loss = divided_by_weights(step, loss, wanted, weight)
    return step.done(loss)


def _class_dim(node: fx.Node) -> int:
    return 1 if len(shape_of(node.args[0])) > 1 else 0


def _of_probabilities(node: fx.Node) -> bool:
    return bool(value_of(node.args[1]).is_floating_point())


def _placement_of_logits(sharder: Sharder, node: fx.Node) -> Sharded | None:
    logits, target = node.args[:2]
    placement, place = sharder.placements[logits], sharder.placements[target]
    if placement is not None or place is None or _of_probabilities(node):
        return placement or place
    return place.at(place.dim + (place.dim >= _class_dim(node)))


def divided_by_weights(step: Steps, loss: fx.Node, wanted: fx.Node, weight: fx.Node | None) -> fx.Node:
    """The mean over tokens: by their number where the target is probabilities, else by the weights of those that are
    not ignored."""
    node = step.node
    if _of_probabilities(node):
        shape = shape_of(node.args[0])
        return step(aten.div.Scalar, loss, prod(shape) // shape[_class_dim(node)])
    counted = step(aten.ne.Scalar, wanted, named(node, "ignore_index"))
    if weight is not None:
        safe = step(aten.where.ScalarOther, counted, wanted, 0)
        counted = step(aten.mul.Tensor, step(aten.index.Tensor, weight, [safe]), counted)
    count = step.total(step.cast(step(aten.sum.default, counted), wide_dtype(value_of(node))))
    return step(aten.div.Tensor, loss, count)


# ---- element by element --------------------------------------------------------------------------------------------
def elementwise(sharder: Sharder, node: fx.Node) -> bool:
    """mse_loss and its kin: a pointwise op, then a sum, or a mean over all elements."""
    shapes = [shape_of(arg) for arg in tensor_args(node)]
    shape = torch.broadcast_shapes(*shapes)
    return reduced(sharder, node, shape, Rule(tuple(aligned(shape, own) for own in shapes)))


def by_sample(sharder: Sharder, node: fx.Node) -> bool:
    """triplet_margin_loss and its kin: a number for each row of [N, C], then a sum or a mean over these. Of the
    arguments that are no rows, such as a weight for each class, the first dim is another."""
    shapes, weight = [shape_of(arg) for arg in tensor_args(node)], has_argument(node, "weight")
    rows = shapes[0][:1]
    if len(shapes[0]) != 2 or any(own[:1] != rows for own in shapes[: 2 if weight else None]):
        return False
    maps: list[Dims] = [{0: 0} for _ in shapes]
    if len(shapes) > 2 and weight:
        maps[2] = {}
    return reduced(sharder, node, rows, Rule(tuple(maps)))


def reduced(sharder: Sharder, node: fx.Node, shape: Sequence[int], rule: Rule) -> bool:
    """The loss that with reduction="none" is of `shape` and follows `rule`."""
    operands = list(tensor_args(node))
    placed = [rule.push(i, place) for i, arg in enumerate(operands) if (place := sharder.placements[arg]) is not None]
    out = next(filter(None, placed), None)
    wanted = rule.pull(out) if out is not None else None
    if out is None or wanted is None or not sharder.consistent(rule, wanted, out):
        return False
    step, reduction = Steps(sharder, node), named(node, "reduction")
    args, kwargs = without_reduction(node, *sharder.operands(node, wanted))
    if reduction == NONE:
        sharder.set(node, sharder.call(node.target, args, node, out, kwargs), out)
        return True
    local = step(node.target, *args, placement=out, **kwargs)
    total = step.total(step(aten.sum.default, local, dtype=wide_dtype(value_of(node))))
    return step.done(step(aten.div.Scalar, total, prod(shape)) if reduction == MEAN else total)


def without_reduction(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with reduction="none"."""
    place = [arg.name for arg in schema_of(node.target).arguments].index("reduction")
    if place < len(args):
        return (*args[:place], NONE, *args[place + 1 :]), kwargs
    return args, {**kwargs, "reduction": NONE}


LOSSES: dict[str, Handler] = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd"), classification),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), elementwise),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"), elementwise),
    **dict.fromkeys(("poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss"), elementwise),
    "soft_margin_loss": elementwise,
    **dict.fromkeys(("triplet_margin_loss", "cosine_embedding_loss"), by_sample),
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss"), by_sample),
}
