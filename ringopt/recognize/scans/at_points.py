"""Values of a part of a graph at points that are drawn: two analytic functions that agree at those are the same.

Where all elements beside some rows are computed alike, two of them are looked at: a tree over rows of [batch, rows,
width, state] is computed at [2, rows, 2, 2]. Nothing in it may pick, join or merge what stands beside the rows, so each
element is computed by itself, and what holds for two holds for all.

Where the number of rows is open, the most there can be are looked at. Nothing may count rows from the end, so row i is
computed alike whatever comes behind it, and what holds for the longest holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_aggregate

from ringopt.dims.op_families import CASTS, COPIES, PADS, PERMUTATIONS, SLICES
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import arguments_of, named, op_name, shape_of
from ringopt.ir.symbolic_sizes import Linear, elements, formula, is_open, longest, same

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def as_written(node: fx.Node, made: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """The arguments of a node as they are."""
    return node.args, node.kwargs


def evaluated(
    nodes: Sequence[fx.Node],
    given: Mapping[fx.Node, Tensor],
    constants: Constants,
    arguments: Callable[[fx.Node, Mapping[fx.Node, Any]], tuple[Any, Any]] = as_written,
) -> list[Tensor] | None:
    """Of `nodes`, in float64 on the CPU, where some values are `given`; None where one cannot be computed. `arguments`
    of a node, and of what is computed so far, are those that it is computed with: also of constants whose sizes are
    open."""
    needed, stack, made = set[fx.Node](), list(nodes), dict[fx.Node, Any](given)
    while stack:
        each = stack.pop()
        if each in needed or each in made:
            continue
        needed.add(each)
        if each in constants and (found := constants.get(each)) is not None:
            made[each] = found.double() if found.is_floating_point() else found
        else:
            stack += each.all_input_nodes
    for each in nodes[0].graph.nodes:
        if each not in needed or each in made:
            continue
        if each.op == "call_function":
            args, kwargs = map_aggregate(fx.map_arg(arguments(each, made), made.__getitem__), wide)
            made[each] = each.target(*args, **kwargs)
        else:
            return None
    return [made[node] for node in nodes]


def wide(argument: Any) -> Any:
    """An argument as it is given where everything is in float64 on the CPU."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return torch.float64 if argument in NARROW else argument


# ---- at few elements -------------------------------------------------------------------------------------------------
MOST_ROWS = 1 << 16
VIEWS = ("view", "reshape", "_unsafe_view")
PICKS = (*SLICES, "select", "select_scatter", "slice_scatter")
MAKERS = frozenset({"ones", "zeros", "full", "new_ones", "new_zeros", "new_full", "arange"})
EACH = frozenset({
    "add", "sub", "rsub", "mul", "neg", "exp", "exp2", "where", "masked_fill", "lt", "le", "gt", "ge", "eq", "ne",
    "logical_not", "logical_and", "logical_or", "bitwise_not", "bitwise_and", "bitwise_or", "unsqueeze", "squeeze",
    "stack", "zeros_like", "ones_like", *CASTS, *COPIES, *PERMUTATIONS,
})  # fmt: skip


class NotAlike(Exception):
    """Elements are not computed alike, or it is not known."""


@dataclass(frozen=True)
class AtFew:
    """The arguments of a node with all rows and few elements beside them, from the values of its operands. Raises
    NotAlike.

    lengths     numbers for open sizes
    rows        what the number of rows depends on, where it is open: a symbol, or the floor of a quotient"""

    lengths: Mapping[sympy.Basic, sympy.Integer] = field(default_factory=dict)
    rows: sympy.Basic | None = None

    @classmethod
    def of(cls, x: fx.Node, dim: int, most: int = 0) -> AtFew:
        """For values made of `x`, which has rows along `dim`: `most` of them where their number is open, or all that
        there can be. Raises NotAlike where that has no limit, or is not `Linear`, and where data decide a size."""
        if not elements(shape_of(x)):
            raise NotAlike
        lengths = {size: sympy.Integer(number) for size, number in Linear.counts(shape_of(x)).items()}
        if not is_open(rows := shape_of(x)[dim]):
            return cls(lengths)
        most = most or longest(rows)
        if most > MOST_ROWS or (counted := Linear.of(formula(rows))) is None:
            raise NotAlike
        others = {size: number for size, number in lengths.items() if not size.has(counted.count)}
        return cls(others | {counted.count: sympy.Integer(counted.solved(most + counted.step - 1))}, counted.count)

    def size(self, size: Any) -> Any:
        """The number of an open size; anything else as it is."""
        if not is_open(size):
            return size
        found = formula(size).xreplace(self.lengths)
        if not found.is_Integer:
            raise NotAlike
        return int(found)

    def shape(self, x: fx.Node) -> list[int]:
        """The sizes of a value, as numbers."""
        return [self.size(size) for size in shape_of(x)]

    def few(self, x: fx.Node, dim: int) -> list[int]:
        """The sizes of what has all rows along `dim`, counted from the last, and two elements along others."""
        shape = self.shape(x)
        return [size if at == len(shape) + dim else min(size, 2) for at, size in enumerate(shape)]

    def __call__(self, node: fx.Node, made: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        if self.rows is not None:
            self.counts_from_the_start(node)
        args, kwargs = map_aggregate((node.args, node.kwargs), self.size)
        name = op_name(node)
        if name in MAKERS:
            self.check_made(node)
            return args, kwargs
        if name in EACH:
            check_broadcast(node, made)
            return args, kwargs
        operands = node.args[0] if name == "cat" else node.args[:1]
        if all(list(made[x].shape) == self.shape(x) for x in operands):
            return args, kwargs
        (x, *_) = operands
        whole, here = self.shape(x), tuple(made[x].shape)
        if name in VIEWS:
            return (x, view_of_few(whole, here, self.shape(node))), {}
        if name == "expand":
            return (x, expand_of_few(whole, here, self.shape(node))), {}
        if name in ("flatten", "unflatten"):
            view_of_few(whole, here, self.shape(node))
        elif any(whole[dim] != here[dim] for dim in dims_of(node, len(whole))):
            raise NotAlike
        return args, kwargs

    def check_made(self, node: fx.Node) -> None:
        """Raises NotAlike for a constant that may differ between elements of which only some are looked at."""
        if any(is_open(size) and not self.is_of_rows(node, dim) for dim, size in enumerate(shape_of(node))):
            raise NotAlike

    def counts_from_the_start(self, node: fx.Node) -> None:
        """Raises NotAlike unless each row is made of the same ones whatever the number of rows."""
        name = op_name(node)
        operands = node.args[0] if name == "cat" else node.args[:1]
        if name in MAKERS:
            given = arguments_of(node)
            fits = name != "arange" or not self.depends([given.get("start"), given.get("step")])
        elif name in EACH:
            fits = not self.depends([*node.args, *node.kwargs.values()])
        elif name == "expand":
            fits = True
        elif name in (*VIEWS, "flatten", "unflatten"):
            fits = self.open_sizes(operands[0]) == self.open_sizes(node)
        elif name in ("tril", "triu"):
            fits = not self.depends(node.args[1:])
        else:
            dims = {dim for dim in dims_of(node, len(shape_of(node))) if any(self.is_of_rows(x, dim) for x in operands)}
            fits = not dims or (len(dims) == 1 and self.fits(node, name, operands, *dims))
        if not fits:
            raise NotAlike

    def depends(self, numbers: Iterable[Any]) -> bool:
        """Whether one of some arguments depends on the number of rows."""
        return any(is_open(number) and formula(number).has(self.rows) for number in numbers)

    def fits(self, node: fx.Node, name: str, operands: Sequence[fx.Node], dim: int) -> bool:
        """Whether what is done to rows along `dim` begins at the first."""
        if name == "cumsum":
            return True
        if name == "cat":
            return not any(self.is_of_rows(x, dim) for x in operands[:-1])
        if name in PADS:
            pads = named(node, "pad")
            front, back = pads[2 * (len(shape_of(node)) - 1 - dim) :][:2]
            constant = arguments_of(node).get("mode", "constant") == "constant"
            return constant and isinstance(front, int) and isinstance(back, int) and back <= 0
        if name not in PICKS:
            return False
        first = named(node, "index" if name.startswith("select") else "start") or 0
        end = named(node, "end") if name == "slice_scatter" else None
        known = end is None or same(end, shape_of(node)[dim]) or (isinstance(end, int) and end >= 0)
        return isinstance(first, int) and first >= 0 and known

    def is_of_rows(self, x: fx.Node, dim: int) -> bool:
        """Whether a size depends on the number of rows."""
        size = shape_of(x)[dim]
        return self.depends([size])

    def open_sizes(self, x: fx.Node) -> list[Any]:
        """Those that depend on the number of rows."""
        return [formula(size) for dim, size in enumerate(shape_of(x)) if self.is_of_rows(x, dim)]


def dims_of(node: fx.Node, rank: int) -> list[int]:
    """The dims along which an operator does something. Raises NotAlike where it is not known."""
    name = op_name(node)
    if name in (*PICKS, "cat"):
        return [named(node, "dim")]
    if name == "flip":
        return list(named(node, "dims"))
    if name in PADS:
        pads = named(node, "pad")
        return [rank - 1 - at // 2 for at, amount in enumerate(pads) if amount]
    if name == "cumsum":
        return [named(node, "dim") % rank]
    if name in ("tril", "triu"):
        return [rank - 2, rank - 1]
    raise NotAlike


def check_broadcast(node: fx.Node, made: Mapping[fx.Node, Any]) -> None:
    """Raises NotAlike where some operands are there whole and others at few elements."""
    try:
        torch.broadcast_shapes(*(made[x].shape for x in node.all_input_nodes))
    except RuntimeError as error:
        raise NotAlike from error


def expand_of_few(whole: Sequence[int], here: Sequence[int], out: Sequence[int]) -> list[int]:
    """The sizes that `here`, which is `whole` at few elements, is expanded to: dims that are new are there whole."""
    more = len(out) - len(whole)
    return [*out[:more], *(size if one == 1 else few for one, few, size in zip(whole, here, out[more:], strict=True))]


def view_of_few(whole: Sequence[int], here: Sequence[int], out: Sequence[int]) -> list[int]:
    """The sizes that a view of `here` has, which is `whole` at few elements, where that of `whole` has `out`. Raises
    NotAlike where a dim at few elements is merged or split."""
    found, i, j = list[int](), 0, 0
    while i < len(whole) and j < len(out):
        k, m = i + 1, j + 1
        while prod(whole[i:k]) != prod(out[j:m]):
            if prod(whole[i:k]) < prod(out[j:m]):
                k += 1
            else:
                m += 1
            if k > len(whole) or m > len(out):
                raise NotAlike
        several = [at for at in range(i, k) if whole[at] != 1]
        if list(whole[i:k]) == list(here[i:k]):
            found += out[j:m]
        elif len(several) == 1 and sum(size != 1 for size in out[j:m]) == 1:
            found += [here[several[0]] if size != 1 else 1 for size in out[j:m]]
        else:
            raise NotAlike
        i, j = k, m
    return [*found, *out[j:]]
