"""Values of a part of a graph at points that are drawn: two analytic functions that agree at those are the same.

Where all elements beside some rows are computed alike, two of them are looked at: a tree over rows of [batch, rows,
width, state] is computed at [2, rows, 2, 2]. Nothing in it may pick, join or merge what stands beside the rows, so each
element is computed by itself, and what holds for two holds for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_aggregate

from ringopt.dims.op_families import COPIES, PADS, PERMUTATIONS, SLICES
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import named, op_name, shape_of

NARROW = (torch.float32, torch.bfloat16, torch.float16)


def evaluated(
    nodes: Sequence[fx.Node],
    given: Mapping[fx.Node, Tensor],
    constants: Constants,
    arguments: Callable[[fx.Node, Mapping[fx.Node, Any]], tuple[Any, Any]] = lambda node, _: (node.args, node.kwargs),
) -> list[Tensor] | None:
    """Of `nodes`, in float64 on the CPU, where some values are `given`; None where one cannot be computed. `arguments`
    of a node, and of what is computed so far, are those that it is computed with."""
    needed, stack = set[fx.Node](), list(nodes)
    while stack:
        each = stack.pop()
        if each not in needed and each not in given:
            needed.add(each)
            stack += [] if each in constants else each.all_input_nodes
    made: dict[fx.Node, Any] = dict(given)
    for each in nodes[0].graph.nodes:
        if each not in needed:
            continue
        if each in constants:
            found = constants.get(each)
            made[each] = found.double() if found is not None and found.is_floating_point() else found
        elif each.op == "call_function":
            args, kwargs = map_aggregate(fx.map_arg(arguments(each, made), made.__getitem__), wide)
            made[each] = each.target(*args, **kwargs)
        if made.get(each) is None:
            return None
    return [made[node] for node in nodes]


def wide(argument: Any) -> Any:
    """An argument as it is given where everything is in float64 on the CPU."""
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return torch.float64 if argument in NARROW else argument


# ---- at few elements -------------------------------------------------------------------------------------------------
VIEWS = ("view", "reshape", "_unsafe_view")
PICKS = (*SLICES, "select", "select_scatter", "slice_scatter")
EACH = frozenset({"add", "sub", "mul", "neg", "unsqueeze", "squeeze", "stack", "zeros_like", "ones_like", *COPIES,
                  *PERMUTATIONS})  # fmt: skip


class NotAlike(Exception):
    """Elements are not computed alike, or it is not known."""


def few(shape: Sequence[int], dim: int) -> list[int]:
    """The sizes of what has all rows along `dim`, counted from the last, and two elements along others."""
    return [size if at == len(shape) + dim else min(size, 2) for at, size in enumerate(shape)]


def at_few(node: fx.Node, made: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
    """The arguments of a node, of whose operands the values are `made`. Raises NotAlike."""
    name = op_name(node)
    if name in EACH:
        return node.args, node.kwargs
    operands = node.args[0] if name == "cat" else node.args[:1]
    if all(tuple(made[x].shape) == tuple(shape_of(x)) for x in operands):
        return node.args, node.kwargs
    (x, *_) = operands
    whole, here = shape_of(x), tuple(made[x].shape)
    if name in VIEWS:
        return (x, view_of_few(whole, here, shape_of(node))), {}
    if name in ("flatten", "unflatten"):
        view_of_few(whole, here, shape_of(node))
    elif any(whole[dim] != here[dim] for dim in dims_of(node, len(whole))):
        raise NotAlike
    return node.args, node.kwargs


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
    raise NotAlike


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
