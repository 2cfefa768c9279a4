"""Statistics over the sequence and what is divided by them: softmax, variance, norms, normalisation layers.

    y = softmax(x, 1)   ->   peak   = extreme(detach(x_rows), [1], True)
                             e_rows = exp(x_rows - peak)
                             y_rows = e_rows / copy_to_group(reduce_from_group(sum(e_rows, 1)))

    y = var(x, 1)       ->   mean   = reduce_from_group(sum(x_rows, 1)) / n
                             y      = reduce_from_group(sum((x_rows - copy_to_group(mean)) ** 2, 1)) / (n - 1)

Two passes, because a difference of large sums would lose the digits of a small variance. Values of 16 bits are computed
in float32 and rounded at the end, as the fused kernels do.
"""

from __future__ import annotations

from math import inf, prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import SAFE_SOFTMAXES, SOFTMAXES
from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.ir.placement import Sharded
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ops import operators
from ringopt.sharding.emit import Handler, Steps, dims_of, getitems, has_argument, keeps_dims, wide_dtype
from ringopt.sharding.sharder import Sharder

aten = torch.ops.aten


class Statistics(Steps):
    """The steps of `node`, whose first argument is reduced over `dims`, one of them sharded; `x` is its local part."""

    def __init__(self, sharder: Sharder, node: fx.Node, place: Sharded, dims: list[int]):
        super().__init__(sharder, node)
        self.place, self.dims = place, dims
        self.count = prod(shape_of(node.args[0])[dim] for dim in dims)
        self.x = self.local(aten.to.dtype, sharder.values[node.args[0]], wide_dtype(first_value(node)))

    def local(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A value with a place for each element of this rank."""
        return self(op, *args, placement=self.place, **kwargs)

    def summed(self, x: fx.Node) -> fx.Node:
        return self.total(self(aten.sum.dim_IntList, x, self.dims, True))

    def peak(self) -> fx.Node:
        """The largest element. It has no gradient: what is made with it does not depend on it."""
        detached = self.local(aten.detach.default, self.x)
        return self.over_ranks(operators.extreme.default, x=detached, dims=self.dims, largest=True)

    def moments(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """The mean, what is left of this rank's elements without it, and the sum of the squares of that."""
        mean = self(aten.div.Scalar, self.summed(self.x), self.count)
        centered = self.local(aten.sub.Tensor, self.x, self.copied(mean))
        return mean, centered, self.summed(self.local(aten.mul.Tensor, centered, centered))

    def root(self, x: fx.Node) -> fx.Node:
        """The square root, with gradient 0 at 0."""
        zero = self(aten.eq.Scalar, x, 0)
        root = self(aten.sqrt.default, self(aten.masked_fill.Scalar, x, zero, 1))
        return self(aten.masked_fill.Scalar, root, zero, 0)

    def reduced(self, x: fx.Node, of: fx.Node | None = None) -> bool:
        """The node is `x`, whose reduced dims have size 1."""
        return self.done(x if keeps_dims(self.node) else self(aten.squeeze.dims, x, self.dims), of=of)


def first_value(node: fx.Node) -> Any:
    """The fake value of the node, or of the first element of its tuple."""
    value = value_of(node)
    return value[0] if isinstance(value, (tuple, list)) else value


def statistics(sharder: Sharder, node: fx.Node, dims: list[int]) -> Statistics | None:
    """None where the sharded dim is not among `dims`, or elements are not real numbers."""
    place = sharder.placements[node.args[0]]
    real = value_of(node.args[0]).is_floating_point()
    return Statistics(sharder, node, place, dims) if place is not None and place.dim in dims and real else None


# ---- exponentials --------------------------------------------------------------------------------------------------
def softmax(sharder: Sharder, node: fx.Node) -> bool:
    """softmax, log_softmax over the sequence: the maximum and the sum of exponentials are reduced over the ranks."""
    step = statistics(sharder, node, dims_of(node))
    if step is None:
        return False
    peak, safe = step.peak(), op_name(node) in SAFE_SOFTMAXES
    if safe:  # rows of -inf become zeros
        peak = step(aten.masked_fill.Scalar, peak, step(aten.eq.Scalar, peak, -inf), 0)
    less = step.local(aten.sub.Tensor, step.x, peak)
    powers = step.local(aten.exp.default, less)
    total = step.summed(powers)
    if safe:
        total = step(aten.masked_fill.Scalar, total, step(aten.eq.Scalar, total, 0), 1)
    total = step.copied(total)
    if op_name(node) in SOFTMAXES:
        return step.done(step.local(aten.div.Tensor, powers, total), step.place)
    return step.done(step.local(aten.sub.Tensor, less, step(aten.log.default, total)), step.place)


def logsumexp(sharder: Sharder, node: fx.Node) -> bool:
    """As softmax; where the maximum is infinite it is not subtracted."""
    step = statistics(sharder, node, dims_of(node))
    if step is None:
        return False
    peak = step.peak()
    finite = step(aten.masked_fill.Scalar, peak, step(aten.isinf.default, peak), 0)
    powers = step.local(aten.exp.default, step.local(aten.sub.Tensor, step.x, finite))
    return step.reduced(step(aten.add.Tensor, step(aten.log.default, step.summed(powers)), finite))


# ---- moments -------------------------------------------------------------------------------------------------------
def variance(sharder: Sharder, node: fx.Node) -> bool:
    """var, std, var_mean, std_mean."""
    users = getitems(node)
    step = statistics(sharder, node, dims_of(node))
    if step is None or (users is None and isinstance(value_of(node), tuple)):
        return False
    correction = named(node, "correction") if has_argument(node, "correction") else int(named(node, "unbiased"))
    mean, _centered, squares = step.moments()
    found = step(aten.div.Scalar, squares, max(0, step.count - (1 if correction is None else correction)))
    if op_name(node).startswith("std"):
        found = step.root(found)
    if not isinstance(value_of(node), tuple):
        return step.reduced(found)
    return all(step.reduced((found, mean)[user.args[1]], of=user) for user in users or ())


def vector_norm(sharder: Sharder, node: fx.Node) -> bool:
    """Of order 1, 2 and infinity."""
    order = named(node, "ord")
    step = statistics(sharder, node, dims_of(node)) if order in (1, 2, inf) else None
    if step is None:
        return False
    if order == 2:
        return step.reduced(step.root(step.summed(step.local(aten.mul.Tensor, step.x, step.x))))
    sizes = step.local(aten.abs.default, step.x)
    if order == 1:
        return step.reduced(step.summed(sizes))
    return step.reduced(step.over_ranks(operators.extreme.default, x=sizes, dims=step.dims, largest=True))


NORMS: dict[str, Handler] = {
    **dict.fromkeys((*SOFTMAXES, "log_softmax", "_log_softmax"), softmax),
    "logsumexp": logsumexp,
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    "linalg_vector_norm": vector_norm,
}


def refuse_mixed_statistics(graph: fx.Graph) -> None:
    """batch_norm writes its running statistics without saying so in its schema, and needs them again in the backward: a
    sharded call that writes the same ones would take them away."""
    written = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.batch_norm.default):
        if named(node, "training") and named(node, "running_mean") in written:
            sentence = "two calls of batch_norm update the same running statistics, and one of them cannot be sharded"
            raise GraphRefused(Refusal(sentence, node))
