"""What the base of a view becomes where the view gets another value.

    v = x.transpose(0, 1);  v.mul_(2)   ->   x1 = transpose(v1, 0, 1)
    v = x[:, 1:];           v.mul_(2)   ->   x1 = slice_scatter(x, v1, 1, 1)
    v = x.type_as(y);       v.mul_(2)   ->   x1 = v1          of one dtype: v is x
    v = z.real;             v.mul_(2)   ->   z1 = view_as_complex(select_scatter(view_as_real(z), v1, -1, 0))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.op_families import RESHAPES, TRANSPOSES
from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import same

aten = torch.ops.aten

Undone = tuple[Any, tuple[Any, ...]]

# Where there is nothing to do, what they return is what they were given: under no_grad too, with its gradient.
UNCHANGED = frozenset(
    {"contiguous", "to", "type_as", "flatten", "positive", "real", "conj", "conj_physical", "resolve_conj"}
    | {"resolve_neg", "sum_to_size", "atleast_1d", "atleast_2d", "atleast_3d"}
)


def undone(view: fx.Node, base: fx.Node, latest: fx.Node, value: fx.Node) -> Undone | None:
    """An op and its arguments: `latest`, the value of `base`, with `value` where `view` looks. None where that is not
    known: for a view of other bytes, or of overlapping ones."""
    if value_of(view).dtype != value_of(base).dtype:
        return (PAIRS[op_name(view)], (value,)) if op_name(view) in PAIRS else None
    if lie_alike(value_of(view), value_of(base)):
        return aten.alias.default, (value,)
    rule = RULES.get(op_name(view))
    return rule(latest, value, view, shape_of(base)) if rule is not None else None


def undone_in_pairs(view: fx.Node, base: fx.Node, latest: fx.Node, value: fx.Node) -> Undone | None:
    """As `undone`, of a part of complex numbers, by their pairs of real numbers: `latest` and `value` are of one dim
    more, but for a `value` of real or imaginary parts. torch has no gradient of `slice_scatter` for complex numbers."""
    if op_name(view) in HALVES:
        return aten.select_scatter.default, (latest, value, -1, HALVES[op_name(view)])
    if op_name(view) not in ("slice", "select"):
        return None
    target, (_, _, *rest) = RULES[op_name(view)](latest, value, view, shape_of(base))
    dim, *places = rest or (0,)
    return target, (latest, value, dim % len(shape_of(base)), *places)


def is_unchanged(view: fx.Node, base: fx.Node) -> bool:
    """Whether `view`, which lies in the memory of `base`, is `base`."""
    found, given = value_of(view), value_of(base)
    return op_name(view) in UNCHANGED and found.dtype == given.dtype and lie_alike(found, given)


def lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether two views of one memory are the same numbers at the same places: what `type_as`, `contiguous`, `expand`,
    `positive` and others return where there is nothing to do."""
    if one.dim() != other.dim() or (one.is_conj(), one.is_neg()) != (other.is_conj(), other.is_neg()):
        return False
    dims = zip(one.shape, other.shape, one.stride(), other.stride(), strict=True)
    there = all(same(a, b) and (same(a, 1) or same(x, y)) for a, b, x, y in dims)
    return there and same(one.storage_offset(), other.storage_offset())


def _reshaped(latest: fx.Node, value: fx.Node, view: fx.Node, shape: tuple[int, ...]) -> Undone:
    """Of a view that has all elements in their order."""
    return aten.reshape.default, (value, list(shape))


def again(latest: fx.Node, value: fx.Node, view: fx.Node, shape: tuple[int, ...]) -> Undone:
    """Of a view that is its own inverse."""
    return view.target, (value, *view.args[1:])


def _unpermuted(latest: fx.Node, value: fx.Node, view: fx.Node, shape: tuple[int, ...]) -> Undone:
    """Of `permute`, by the inverse permutation."""
    order = [dim % len(shape) for dim in view.args[1]]
    return aten.permute.default, (value, [order.index(dim) for dim in range(len(shape))])


def _diagonal(latest: fx.Node, value: fx.Node, view: fx.Node, shape: tuple[int, ...]) -> Undone:
    """Of the diagonal, whose arguments may have defaults."""
    return aten.diagonal_scatter.default, (latest, value, *(named(view, name) for name in ("offset", "dim1", "dim2")))


PAIRS = {"view_as_real": aten.view_as_complex.default, "view_as_complex": aten.view_as_real.default}
HALVES = {"real": 0, "imag": 1}
PARTS = ("slice", "select", "diagonal", "linalg_diagonal")

RULES: dict[str, Callable[[fx.Node, fx.Node, fx.Node, tuple[int, ...]], Undone]] = {
    "slice": lambda latest, value, view, shape: (aten.slice_scatter.default, (latest, value, *view.args[1:])),
    "select": lambda latest, value, view, shape: (aten.select_scatter.default, (latest, value, *view.args[1:])),
    **dict.fromkeys(("diagonal", "linalg_diagonal"), _diagonal),
    **dict.fromkeys((*TRANSPOSES, "numpy_T", "mH", "matrix_H", "adjoint", "_conj"), again),
    "permute": _unpermuted,
    "movedim": lambda latest, value, view, shape: (view.target, (value, view.args[2], view.args[1])),
    **dict.fromkeys(
        (
            *(*RESHAPES, "unsqueeze", "view_as"),
            *("reshape_as", "ravel", "atleast_1d", "atleast_2d", "atleast_3d"),
        ),
        _reshaped,
    ),
}
