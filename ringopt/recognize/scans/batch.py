"""An op for all steps at once: of operands that have the steps along dim 0, or are the same in all of them.

    select(x, 1, 3)        ->   select(xs, 2, 3)
    matmul(x, w)           ->   matmul(xs, w)
    einsum("ij,j->i")      ->   einsum("Zij,j->Zi")

Ops without a rule here are left to the step. What they are given lies as it did, or is copied where a view would need
that (reshape), so the numbers are those of the step.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES, ELEMENTWISE, RESHAPES, SPLITS
from ringopt.ir.nodes import emit, op_name, origin, shape_of, value_of
from ringopt.torch_compat.schema import OpOverload

aten = torch.ops.aten


class NoRule(Exception):
    """What an op does for all steps at once is not known here."""


class OverSteps:
    """Writes into `graph` what a node of a step is for all of its steps. `made` has what the operands are there, and
    `stacked` those of them that have the steps along dim 0."""

    def __init__(self, graph: fx.Graph, steps: int):
        self.graph, self.steps = graph, steps
        self.made: dict[fx.Node, fx.Node] = {}
        self.stacked: set[fx.Node] = set()

    def add(self, node: fx.Node) -> None:
        """Raises NoRule."""
        if not any(arg in self.stacked for arg in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.made.__getitem__)
            self.made[node] = call(self.graph, node.target, args, kwargs, node)
            return
        rule = RULES.get(op_name(node)) or (pointwise if is_pointwise(node) else None)
        if rule is None or not isinstance(value_of(node), (torch.Tensor, tuple, list)):
            raise NoRule(str(node.target))
        target, args, kwargs = rule(node, self)
        args, kwargs = fx.map_arg((args, kwargs), lambda arg: self.made.get(arg, arg))
        try:
            new = call(self.graph, target, args, kwargs, node)
        except (RuntimeError, IndexError) as error:  # what the op says of operands with a dim more
            raise NoRule(f"{node.target}: {error}") from error
        if forms(value_of(new)) != [((self.steps, *shape), dtype) for shape, dtype in forms(value_of(node))]:
            raise NoRule(f"{node.target} gives another shape or dtype for all steps at once")
        self.made[node] = new
        self.stacked.add(node)

    def ranked(self, node: Any, rank: int) -> Any:
        """A stacked operand with as many dims behind the steps: broadcast from the right as in the step."""
        if node not in self.stacked or len(shape_of(node)) >= rank:
            return node
        sizes = [self.steps, *(1 for _ in range(rank - len(shape_of(node)))), *shape_of(node)]
        return call(self.graph, aten.reshape.default, (self.made[node], sizes), {}, node)

    def spread(self, node: fx.Node) -> fx.Node:
        """An operand with the steps along dim 0."""
        if node in self.stacked:
            return self.made[node]
        sizes = [self.steps, *shape_of(node)]
        return call(self.graph, aten.expand.default, (self.made[node], sizes), {}, node)


def forms(value: Any) -> list[tuple[tuple[Any, ...], torch.dtype]]:
    """Shape and dtype of a tensor, or of each of several."""
    return [(tuple(x.shape), x.dtype) for x in (value if isinstance(value, (tuple, list)) else (value,))]


def call(graph: fx.Graph, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
    """A call with its fake value, of an operator or of getitem."""
    if isinstance(target, OpOverload):
        return emit(graph, target, args, like, kwargs)
    new = graph.call_function(target, tuple(args), kwargs)
    given = fx.map_arg(new.args, value_of)
    new.meta = {**origin(like), "val": target(*given)}
    return new


Call = tuple[Any, Any, Mapping[str, Any]]
Rule = Callable[[fx.Node, OverSteps], Call]


def is_pointwise(node: fx.Node) -> bool:
    """Whether an op gives an element for an element of each operand, which are broadcast."""
    target = node.target
    return isinstance(target, OpOverload) and (torch.Tag.pointwise in target.tags or op_name(node) in POINTWISE)


POINTWISE = frozenset({*ELEMENTWISE, *COPIES, *CASTS, "detach"})
LIKE = ("zeros_like", "ones_like", "full_like")
KEEPS_LAST = ("tril", "triu", "constant_pad_nd", "layer_norm", "rms_norm", "linear", *LIKE)


def pointwise(node: fx.Node, batch: OverSteps) -> Call:
    """Operands are aligned behind the steps."""
    rank = len(shape_of(node))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: batch.ranked(arg, rank))
    if kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        raise NoRule("memory_format")
    return node.target, args, kwargs


def unchanged(node: fx.Node, batch: OverSteps) -> Call:
    """The last dims are all that it is about."""
    if any(arg in batch.stacked for arg in node.all_input_nodes[1:]):
        raise NoRule("its other operands")
    return node.target, node.args, node.kwargs


def dims_at(*at: int) -> Rule:
    """Arguments number `at` are dims, or lists of them, of the operand as it comes in."""

    def rule(node: fx.Node, batch: OverSteps) -> Call:
        args = only_first(node, batch)
        if not shape_of(args[0]):
            raise NoRule("a dim of a number is no dim, and of all steps it is theirs")
        for place in at:
            if len(args) <= place or args[place] is None:
                raise NoRule("all dims at once")
            dims = args[place]
            args[place] = [d if d < 0 else d + 1 for d in dims] if isinstance(dims, (list, tuple)) else behind(dims)
        return node.target, args, node.kwargs

    return rule


def behind(dim: int) -> int:
    """The dim of a stacked operand."""
    return dim if dim < 0 else dim + 1


def only_first(node: fx.Node, batch: OverSteps) -> list[Any]:
    """The arguments, of which the first is the one tensor."""
    if len(node.all_input_nodes) != 1 or node.args[0] not in batch.stacked:
        raise NoRule("its other operands")
    return list(node.args)


def part(node: fx.Node, batch: OverSteps) -> Call:
    """select, slice, narrow."""
    args = only_first(node, batch)
    dim = args[1] if len(args) > 1 else 0
    return node.target, [args[0], behind(dim), *args[2:]], node.kwargs


def split(node: fx.Node, batch: OverSteps) -> Call:
    """Several parts along a dim."""
    args = only_first(node, batch)
    at = 1 if op_name(node) == "unbind" else 2
    if node.kwargs:
        raise NoRule("a dim by name")
    return node.target, [*args[:at], behind(args[at] if len(args) > at else 0)], {}


def reshape(node: fx.Node, batch: OverSteps) -> Call:
    """To the shape of a step, behind the steps."""
    only_first(node, batch)
    return aten.reshape.default, [node.args[0], [batch.steps, *shape_of(node)]], {}


def expand(node: fx.Node, batch: OverSteps) -> Call:
    """To the shape of a step, behind the steps."""
    only_first(node, batch)
    return aten.expand.default, [batch.ranked(node.args[0], len(shape_of(node))), [batch.steps, *shape_of(node)]], {}


def permute(node: fx.Node, batch: OverSteps) -> Call:
    """The steps stay in front."""
    args, rank = only_first(node, batch), len(shape_of(node))
    return node.target, [args[0], [0, *(d % rank + 1 for d in args[1])]], {}


def transpose_two(node: fx.Node, batch: OverSteps) -> Call:
    """t, of a matrix."""
    args = only_first(node, batch)
    if len(shape_of(node)) != 2:
        raise NoRule("t")
    return aten.transpose.int, [args[0], -2, -1], {}


def product(node: fx.Node, batch: OverSteps) -> Call:
    """Of matrices, or of batches of them."""
    left, right = node.args[:2]
    ranks = len(shape_of(left)), len(shape_of(right))
    if node.kwargs or len(node.args) > 2 or min(ranks) < 2:
        raise NoRule("a vector")
    return aten.matmul.default, [batch.ranked(left, max(ranks)), batch.ranked(right, max(ranks))], {}


def pad(node: fx.Node, batch: OverSteps) -> Call:
    """Of the last dims, by a constant."""
    if len(node.args) > 2 and node.args[2] != "constant":
        raise NoRule("another mode")
    return unchanged(node, batch)


def einsum(node: fx.Node, batch: OverSteps) -> Call:
    """With a letter more, for the steps."""
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    inputs, arrow, out = equation.partition("->")
    free = [letter for letter in string.ascii_uppercase if letter not in equation]
    if not arrow or "." in equation or not free:
        raise NoRule("an equation with dots")
    parts = [free[0] * (x in batch.stacked) + text for x, text in zip(operands, inputs.split(","), strict=True)]
    return node.target, [f"{','.join(parts)}->{free[0]}{out}", operands], node.kwargs


def joined(node: fx.Node, batch: OverSteps) -> Call:
    """cat and stack, of operands that all have the steps."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return node.target, [[batch.spread(x) for x in node.args[0]], behind(dim)], {}


def solve(node: fx.Node, batch: OverSteps) -> Call:
    """Of matrices, or of batches of them."""
    left, right = node.args[:2]
    rank = max(len(shape_of(left)), len(shape_of(right)))
    if min(len(shape_of(left)), len(shape_of(right))) < 2 or len(node.args) > 2:
        raise NoRule("a vector")
    return node.target, [batch.ranked(left, rank), batch.ranked(right, rank)], node.kwargs


def item(node: fx.Node, batch: OverSteps) -> Call:
    """One of several values."""
    return operator.getitem, node.args, {}


RULES: dict[str, Rule] = {
    **dict.fromkeys(RESHAPES, reshape),
    **dict.fromkeys(("select", "slice", "narrow"), part),
    **dict.fromkeys(("unbind", *SPLITS), split),
    **dict.fromkeys(("transpose", "movedim"), dims_at(1, 2)),
    **dict.fromkeys(("unsqueeze", "sum", "mean", "amax", "amin", "prod", "cumsum", "cumprod", "softmax"), dims_at(1)),
    **dict.fromkeys(("logsumexp", "flip", "any", "all", "argmax", "argmin", "logcumsumexp", "log_softmax"), dims_at(1)),
    **dict.fromkeys(("matmul", "bmm", "mm"), product),
    **dict.fromkeys(("cat", "stack"), joined),
    **dict.fromkeys(KEEPS_LAST, unchanged),
    "expand": expand, "permute": permute, "t": transpose_two, "pad": pad, "einsum": einsum,
    "linalg_solve_triangular": solve, "getitem": item,
}  # fmt: skip
