"""Sums over what stands before each position, a first term in front: the states in which each step of a scan begins.

    y = sums of cat([first, v])       S = first;  y[c] = S;  S = exp(x[c + 1]) S + v[c]        for c = 0, 1, ...
    y[:-1], y[-1]                     all y, and the last S

So Mamba2 is written: a state a chunk, zeros in front of them, and the last for the cache. A scan over cat([first, v])
has a step more than there are chunks, so ranks would have its rows elsewhere than those of the chunks, and shift them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import emit, is_aten, named, op_name, shape_of, value_of
from ringopt.ir.placement import Sharded

aten = torch.ops.aten

VIEWS = ("unsqueeze", "transpose", "permute", "alias", "clone", "contiguous", "to", "_to_copy")  # no sizes are named
LAST = "last"
BEFORE = "before"


@dataclass(frozen=True)
class Parts:
    """`joined` is cat([first, rest]), along its `dim`, a single row and others; `views` lead from it to what is
    summed."""

    joined: fx.Node
    dim: int
    views: tuple[fx.Node, ...]

    def emit(self, graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
        """The first, and the others, viewed as the whole was."""
        found = []
        for part in self.joined.args[0]:
            for view in self.views:
                part = emit(graph, view.target, (part, *view.args[1:]), view, dict(view.kwargs))
            found.append(part)
        return found[0], found[1]


def joined_in(value: fx.Node, dim: int) -> Parts | None:
    """Where a value is joined along `dim` of a single row and others; None where it is not."""
    views = list[fx.Node]()
    while is_aten(value) and op_name(value) in VIEWS:
        rule = rule_of(value)
        above = rule.pull(Sharded(dim, 1, shape_of(value)[dim], 1)) if rule is not None else None
        if above is None or len(above) != 1 or above[0] is None or above[0].outer * above[0].inner != 1:
            return None
        views.insert(0, value)
        value, dim = value.args[0], above[0].dim
    if value.target is not aten.cat.default or named(value, "dim") % len(shape_of(value)) != dim:
        return None
    parts = value.args[0]
    return Parts(value, dim, tuple(views)) if len(parts) == 2 and shape_of(parts[0])[dim] == 1 else None


def readers(node: fx.Node, dim: int) -> dict[fx.Node, str] | None:
    """Who reads all rows along `dim` but the last (BEFORE), and who reads the last (LAST); None where anybody reads
    others."""
    size, found = shape_of(node)[dim], dict[fx.Node, str]()
    for reader in node.users:
        if not is_aten(reader) or op_name(reader) not in ("slice", "select"):
            return None
        if named(reader, "dim") % len(shape_of(node)) != dim:
            return None
        if op_name(reader) == "select" and named(reader, "index") in (-1, size - 1):
            found[reader] = LAST
        elif op_name(reader) == "slice" and shape_of(reader)[dim] == size - 1 and named(reader, "start") in (None, 0):
            found[reader] = BEFORE
        else:
            return None
    return found


def without_first(graph: fx.Graph, x: fx.Node, dim: int) -> fx.Node:
    """x[1:] along `dim`: what was padded, where one row was put in front."""
    behind = 2 * (len(shape_of(x)) - 1 - dim)
    if is_aten(x) and op_name(x) in ("pad", "constant_pad_nd") and only(named(x, "pad"), behind):
        return named(x, "self")
    return emit(graph, aten.slice.Tensor, (x, dim, 1, shape_of(x)[dim]), x)


def only(amounts: Sequence[int], at: int) -> bool:
    """Whether the amount `at` is one, and all others are none."""
    return len(amounts) > at and all(amount == (i == at) for i, amount in enumerate(amounts))


def put(found: dict[fx.Node, str], before: fx.Node, last: fx.Node) -> None:
    """In the places of `readers`."""
    for reader, what in found.items():
        reader.replace_all_uses_with(before if what == BEFORE else last)


def in_order_of(graph: fx.Graph, new: fx.Node, old: fx.Node) -> fx.Node:
    """A copy with the strides of a contiguous tensor, where `old` is one, which views may rely on."""
    if value_of(new).stride() == value_of(old).stride() or not value_of(old).is_contiguous():
        return new
    return emit(graph, aten.clone.default, (new,), old, {"memory_format": torch.contiguous_format})
