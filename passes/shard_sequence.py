"""Shard everything between the attention sites along the sequence.

    x = linear(embedding(ids))              x = linear(embedding(scatter(ids, n)))               # n / p tokens
    y = attention(q, k, v, "causal")   ->   y = ring_attention(q, k, v, n, n, "causal", ...)
    return y                                return gather(y, n)

Everything starts replicated. An attention site demands q, k, v sharded along their rows; its output is sharded; rules
(ringopt/graph/axes.py) push that forward, and demands climb back to the inputs (ringopt/graph/sharder.py). What no rule
knows is computed on gathered operands and reported. Losses reduce sum and count apart, for a mean of local means weighs
tokens wrongly.

Before: functional graph, sites chosen by choose_strategy.
After: every value replicated (same bits and same complete gradient on every rank) or sharded.
"""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
import torch.fx as fx

import ringopt.ops.convert
import ringopt.ops.rows_here  # noqa: F401  (registers the operators)
from ringopt.attention.layouts import layout_of
from ringopt.distributed.mesh import ANY
from ringopt.graph.axes import rule_of
from ringopt.graph.mask import Mask
from ringopt.graph.nodes import argument, module_path, op_name, shape_of, tensor_args, value_of
from ringopt.graph.placement import Sharded
from ringopt.graph.refusal import Refusal
from ringopt.graph.sharder import Sharder
from ringopt.ops.dropout import SEEDS
from ringopt.ops.ring import VERSION
from ringopt.pipeline import Context, GraphRefused, Pass
from ringopt.report import Gather

aten = torch.ops.aten


class ShardSequence(Pass):
    name = "shard_sequence"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if not any(info.refusal is None for info in context.sites.values()):
            return
        mesh, layout = context.mesh, context.layout

        def rows_here(length: int) -> int:
            if mesh.name == ANY:
                raise GraphRefused(Refusal("rows of a rank had to be counted, and the ranks are known only later"))
            return sum(map(len, layout_of(layout, length, mesh.size).ranges(mesh.rank)))

        sharder = Sharder(gm.graph, mesh.name, layout, rows_here, asks=mesh.name == ANY)
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                sharder.keep(node)
            elif node.op == "output":
                sharder.reader = node
                sharder.graph.output(fx.map_arg(node.args[0], sharder.replicated))
            else:
                shard_op(sharder, node, context)
        gm.graph = sharder.finished()
        record(sharder, context)


def shard_op(sharder: Sharder, node: fx.Node, context: Context) -> None:
    site = context.sites.get(node)
    handled = (
        (site is not None and site.refusal is None and attend(sharder, node, context))
        or sharder.along(node)
        or partial_sums(sharder, node)
        or (op_name(node) == "cross_entropy_loss" and cross_entropy(sharder, node))
        or (op_name(node) == "dropout" and dropout(sharder, node))
    )
    if not handled:
        sharder.whole(node)
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            context.replicated_random.append(node.name)


# ---- attention -----------------------------------------------------------------------------------------------------
def attend(sharder: Sharder, node: fx.Node, context: Context) -> bool:
    q, k, v, _given, sources, sinks, seed, pattern, mask, *how = node.args
    info = context.sites[node]
    if any(place is not None and place.dim < 2 for place in map(sharder.placements.get, (q, k, v))):
        info.strategy, info.bytes_sent = "none", 0
        return False  # sharded over batch or heads (windows folded into the batch): no rows are missing
    q_length, kv_length = shape_of(q)[2], shape_of(k)[2]
    out = Sharded(2, 1, q_length, 1)
    sharder.reader = node
    local = (sharder.sharded(q, out), *(sharder.sharded(x, Sharded(2, 1, kv_length, 1)) for x in (k, v)))
    parsed = Mask.parse(mask)
    learned = [i for i in parsed.differentiable if sharder.carries[sources[i]]]

    def placed(i: int, source: fx.Node) -> fx.Node:
        if i in parsed.row_dims:
            return sharder.sharded(source, Sharded(parsed.row_dims[i], 1, q_length, 1))
        return sharder.beside(source) if i in learned else sharder.replicated(source)

    read = [placed(i, source) for i, source in enumerate(sources)]
    extras = [sharder.beside(sinks) if sinks is not None else None]
    extras.append(sharder.replicated(seed) if seed is not None else None)
    both = sharder.step(
        torch.ops.ringopt.ring_attention.default,
        *(*local, read, *extras, q_length, kv_length, pattern, mask, learned, *how),
        *(sharder.layout, sharder.layout, info.strategy, info.kernel, sharder.group, VERSION),
        like=node,
    )
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, out), out)
    return True


# ---- sums over the sequence ----------------------------------------------------------------------------------------
def partial_sums(sharder: Sharder, node: fx.Node) -> bool:
    """A sum over the sharded dim is the sum of local sums; a mean divides it; a product contracts it."""
    rule, operands = rule_of(node), list(tensor_args(node))
    if rule is None or not rule.summed:
        return False
    for i, arg in enumerate(operands):
        placement = sharder.placements.get(arg)
        wanted = rule.sums(i, placement) if placement is not None else None
        if wanted is None:
            continue
        sharder.reader = node
        args, kwargs = sharder.operands(node, wanted)
        local = local_sum(sharder, node, args, kwargs)
        total = sharder.step(torch.ops.ringopt.reduce_from_group.default, local, sharder.group, like=node)
        if op_name(node) == "mean":
            count = prod(shape_of(arg)[dim] for dim in reduced_dims(node))
            total = sharder.step(aten.div.Scalar, total, count, like=node)
        sharder.set(node, sharder.call(aten.to.dtype, (total, value_of(node).dtype), node, None), None)
        return True
    return False


def local_sum(sharder: Sharder, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    if op_name(node) not in ("sum", "mean"):
        return sharder.step(node.target, *args, like=node, **kwargs)
    keep = bool(argument(node, 2, "keepdim", False))
    return sharder.step(aten.sum.dim_IntList, args[0], reduced_dims(node), keep, like=node, dtype=wide_dtype(node))


def wide_dtype(node: fx.Node) -> torch.dtype:
    """What partial sums are added up in: of 16 bits, float32, which also counts tokens without rounding."""
    dtype: torch.dtype = value_of(node).dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def reduced_dims(node: fx.Node) -> list[int]:
    rank, dims = len(shape_of(node.args[0])), argument(node, 1, "dim")
    return [dim % rank for dim in ([dims] if isinstance(dims, int) else dims or range(rank))]


# ---- losses --------------------------------------------------------------------------------------------------------
NONE, MEAN, SUM = 0, 1, 2  # reductions of aten.cross_entropy_loss


def cross_entropy(sharder: Sharder, node: fx.Node) -> bool:
    """Class indices, sharded over tokens: the sum of losses and what it is divided by are reduced apart."""
    logits, target = node.args[:2]
    weight, reduction = argument(node, 2, "weight"), argument(node, 3, "reduction", MEAN)
    ignored, smoothing = argument(node, 4, "ignore_index", -100), argument(node, 5, "label_smoothing", 0.0)
    rank = len(shape_of(logits))
    classes = 1 if rank > 1 else 0
    placement = sharder.placements.get(logits)
    if placement is None and (place := sharder.placements.get(target)) is not None:
        placement = place.at(place.dim + (place.dim >= classes))
    if placement is None or placement.dim == classes or value_of(target).is_floating_point():
        return False
    rows = placement.at(placement.dim - (placement.dim > classes))
    sharder.reader = node
    here, wanted = sharder.sharded(logits, placement), sharder.sharded(target, rows)
    weights = sharder.beside(weight) if weight is not None else None

    def call(op: Any, *args: Any) -> fx.Node:
        return sharder.step(op, *args, like=node)

    if reduction == NONE:
        loss = call(aten.cross_entropy_loss.default, here, wanted, weights, NONE, ignored, smoothing)
        sharder.set(node, loss, rows)
        return True
    reduce, wide = torch.ops.ringopt.reduce_from_group.default, wide_dtype(node)
    loss = call(aten.cross_entropy_loss.default, here, wanted, weights, SUM, ignored, smoothing)
    loss = call(reduce, call(aten.to.dtype, loss, wide), sharder.group)
    if reduction == MEAN:
        counted = call(aten.ne.Scalar, wanted, ignored)
        if weight is not None:
            safe = call(aten.where.ScalarOther, counted, wanted, 0)
            taken = call(aten.index.Tensor, weights, [safe])
            counted = call(aten.mul.Tensor, taken, counted)
        count = call(aten.sum.default, counted)
        count = call(reduce, call(aten.to.dtype, count, wide), sharder.group)
        loss = call(aten.div.Tensor, loss, count)
    sharder.set(node, sharder.call(aten.to.dtype, (loss, value_of(node).dtype), node, None), None)
    return True


# ---- random numbers ------------------------------------------------------------------------------------------------
def dropout(sharder: Sharder, node: fx.Node) -> bool:
    """Of a shard, each rank from its own stream; of a replicated value, by every rank alike (`whole`)."""
    x, p = node.args[0], argument(node, 1, "p")
    placement = sharder.placements[x]
    if placement is None:
        return False
    device = value_of(x).device
    seed = sharder.step(aten.randint.default, SEEDS, [], like=node, dtype=torch.int64, device=device)
    both = sharder.step(torch.ops.ringopt.dropout.default, sharder.values[x], seed, p, sharder.group, like=node)
    sharder.set(node, sharder.call(operator.getitem, (both, 0), node, placement), placement)
    return True


def record(sharder: Sharder, context: Context) -> None:
    """Gathers for the report. One whose result was dead code costs nothing and is not told."""
    alive = set(sharder.graph.nodes)
    for note in sharder.gathers:
        if sharder.converted[note.value, "whole"] in alive:
            op = "output" if note.reader.op == "output" else op_name(note.reader)
            context.gathers.append(Gather(op, sharder.describe(note), note.bytes, module_path(note.reader)))
