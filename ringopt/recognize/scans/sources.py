"""Where the values of the steps of a recurrence come from: all of them stacked along dim 0, mostly as a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import emit, named, op_name, shape_of, value_of
from ringopt.recognize.scans.operands import Counted, Outside, common, leaves, spelled

aten = torch.ops.aten


@dataclass(frozen=True)
class PartPlaces:
    """Of a dim: `first`, `first + step` and so on. Of these single ones (`width` 0), or `width` from there."""

    dim: int
    first: int
    step: int
    width: int = 0

    @property
    def extent(self) -> int:
        return max(self.width, 1)

    def within(self, size: Any, steps: int) -> bool:
        """Whether that many lie within a dim of `size`."""
        ends = self.first, self.first + self.step * (steps - 1)
        return isinstance(size, int) and min(ends) >= 0 and max(ends) + self.extent <= size

    def forward(self, steps: int) -> PartPlaces:
        """The same places, the lowest first."""
        lowest = self.first + self.step * (steps - 1)
        return self if self.step > 0 else PartPlaces(self.dim, lowest, -self.step, self.width)


@dataclass(frozen=True)
class TensorParts:
    """A part of one tensor for every step."""

    tensor: fx.Node
    places: PartPlaces

    def stacked(self, graph: fx.Graph, steps: int, like: fx.Node) -> fx.Node:
        """[steps, ...]"""
        at, x = self.places.forward(steps), self.tensor
        rank, end = len(shape_of(x)), at.first + at.step * (steps - 1) + at.extent
        if at.width == 0:
            if (at.first, end, at.step) != (0, shape_of(x)[at.dim], 1):
                x = emit(graph, aten.slice.Tensor, (x, at.dim, at.first, end, at.step), like)
        else:
            if (at.first, end) != (0, shape_of(x)[at.dim]):
                x = emit(graph, aten.slice.Tensor, (x, at.dim, at.first, end), like)
            if at.step == at.width:
                sizes = shape_of(x)
                cut = [*sizes[: at.dim], steps, at.width, *sizes[at.dim + 1 :]]
                x = emit(graph, aten.reshape.default, (x, cut), like)
            else:
                x = emit(graph, aten.unfold.default, (x, at.dim, at.width, at.step), like)
                order = [at.dim, *range(at.dim), rank, *range(at.dim + 1, rank)]
                return self._in_order(emit(graph, aten.permute.default, (x, order), like), graph, like)
            rank += 1
        if at.dim:
            x = emit(graph, aten.permute.default, (x, [at.dim, *(d for d in range(rank) if d != at.dim)]), like)
        return self._in_order(x, graph, like)

    def _in_order(self, x: fx.Node, graph: fx.Graph, like: fx.Node) -> fx.Node:
        return x if self.places.step > 0 else emit(graph, aten.flip.default, (x, [0]), like)


@dataclass(frozen=True)
class Listed:
    """A value for every step; where the last lacks one, any will do."""

    values: tuple[fx.Node, ...]

    def stacked(self, graph: fx.Graph, steps: int, like: fx.Node) -> fx.Node:
        values = [*self.values, *self.values[-1:] * (steps - len(self.values))]
        return emit(graph, aten.stack.default, (values,), like)


@dataclass(frozen=True)
class Stacked:
    """A tensor that holds them along dim 0 already."""

    tensor: fx.Node

    def stacked(self, graph: fx.Graph, steps: int, like: fx.Node) -> fx.Node:
        return self.tensor


Source = TensorParts | Listed | Stacked


def places_of(name: str, numbers: Sequence[Any]) -> PartPlaces | None:
    """Of a part op: what its operands behind the tensor say, as `spelled` and `common` have them."""
    if any(not isinstance(each, (Outside, Counted)) for each in numbers):
        return None
    dim, first, *rest = (each.value if isinstance(each, Outside) else each for each in numbers)
    if not isinstance(first, Counted) or not first.step or not isinstance(dim, int):
        return None
    if name in ("select", "select_scatter"):
        return PartPlaces(dim, first.first, first.step)
    if name == "narrow":
        return PartPlaces(dim, first.first, first.step, rest[0]) if isinstance(rest[0], int) else None
    end, apart = (*rest, 1)[:2] if rest else (None, 1)  # of an open size, as the program has it
    if not isinstance(end, Counted) or end.step != first.step or apart != 1:
        return None
    return PartPlaces(dim, first.first, first.step, end.first - first.first)


def pieces_of(values: Sequence[fx.Node]) -> TensorParts | None:
    """The tensor that a list of values are parts of, in one order."""
    name = op_name(values[0])
    if any(value.target != values[0].target for value in values):
        return None
    rows = [leaves(spelled(value)) for value in values]
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        return None
    tensor, *numbers = (common(column, {}) for column in zip(*rows, strict=True))
    if not isinstance(tensor, Outside) or not isinstance(tensor.value, fx.Node):
        return None
    if name == "getitem" and isinstance(numbers[0], Counted):
        return part_of_split(tensor.value, numbers[0])
    places = places_of(name, numbers) if name in ("select", "slice", "narrow") else None
    return TensorParts(tensor.value, places) if places is not None else None


def part_of_split(split: fx.Node, at: Counted) -> TensorParts | None:
    """One of the values that unbind, split or chunk give, where all that are asked for are of one size."""
    name = op_name(split)
    if name not in ("unbind", "split", "split_with_sizes", "chunk") or not at.step:
        return None
    x = split.args[0]
    dim = named(split, "dim") % len(shape_of(x))
    if name == "unbind":
        return TensorParts(x, PartPlaces(dim, at.first % shape_of(x)[dim], at.step))
    sizes = [part.shape[dim] for part in value_of(split)]
    if not all(isinstance(size, int) for size in sizes) or len(set(sizes[:-1])) > 1 or not sizes[0]:
        return None  # a last one of another size is another kind of value, and so in no list with the others
    first = list(accumulate(sizes, initial=0))[at.first % len(sizes)]
    return TensorParts(x, PartPlaces(dim, first, at.step * sizes[0], sizes[0]))
