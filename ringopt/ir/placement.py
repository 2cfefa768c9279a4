"""Placements: a value is replicated (None), or sharded along one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ringopt.ir.symbolic_sizes import divides, formula, is_open, least_and_most, plain, same


@dataclass(frozen=True, eq=False)
class Sharded:
    """Dim `dim` has size outer * length * inner; the factor `length`, a sequence, is sharded over the ranks. Each may
    be a symbolic size.

    The factors make flatten(batch, sequence) and back free: [b, n, d] sharded on n is Sharded(1, 1, n, 1), and its view
    [b * n, d] is Sharded(0, b, n, 1). A value without a placement is replicated: identical on every rank.
    """

    dim: int
    outer: int
    length: int
    inner: int

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(map(formula, (self.dim, self.outer, self.length, self.inner)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sharded) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def size(self) -> int:
        return self.outer * self.length * self.inner

    def at(self, dim: int) -> Sharded:
        return replace(self, dim=dim)

    def __str__(self) -> str:
        factors = "" if self.outer == self.inner == 1 else f" of {self.outer}x{self.length}x{self.inner}"
        return f"S({self.dim}{factors})"


@dataclass(frozen=True)
class Layouts:
    """The layout of each sequence, by its length: values of equally many tokens line up, whatever they come from.

    `axes`: length and layout of the sequences that are attended over. Any other length, of a slice or a concatenation,
    has the layout of the nearest of them; `name` where none has a known length, or for a symbolic one. A guard may
    specialise a length later, so lengths are compared by their current formulas.

    `grains`: (grain, units, layout) of sequences that are cut between units of so many rows, for all that have about as
    many: a recurrence may have a step more than there are units, and a convolution's output some rows. Where the number
    of units is open, for those that have as many. "" is the layout that they have otherwise.
    """

    name: str = "contiguous"
    axes: tuple[tuple[int, str], ...] = ()
    grains: tuple[tuple[int, int, str], ...] = ()

    def of(self, length: int) -> str:
        name = self.plain(length)
        for grain, counted, own in self.grains:
            units = counted_in(length, grain, plain(counted))
            if units is not None:
                return f"{own or name}{units}"
        return name

    def plain(self, length: int) -> str:
        """Without its grain."""
        at, axes = formula(length), {formula(axis): layout for axis, layout in self.axes}
        if at in axes:
            return axes[at]
        known = [axis for axis in axes if isinstance(axis, int)] if isinstance(at, int) else []
        return axes[min(known, key=lambda axis: (abs(axis - at), axis))] if known else self.name


def counted_in(length: int, grain: int, units: int) -> str | None:
    """How a layout says that `length` is cut between so many units; None where it is not known to be about as long.
    Where their number is open, it is that of the length without some rows that are added to it."""
    if not is_open(units):
        near = (abs(end - grain * units) < max(grain, 2) for end in least_and_most(length))
        return f":{grain}x{units}" if all(near) else None
    added = int(formula(length).as_coeff_Add()[0]) if is_open(length) else 0
    for more in (0, added):
        if 0 <= more < grain and same(-(-(length - more) // grain), units):
            return f":{grain}+{more}" if more else f":{grain}" if grain > 1 else ""
    return None


@dataclass(frozen=True)
class Spread:
    """How a tensor of global `size` and `stride` is sharded over the ranks of the mesh `group`; `name` is for
    errors. While a graph is made its sizes may be symbolic."""

    placement: Sharded
    layout: str
    group: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    name: str = field(compare=False)

    def with_sizes(self, number: Callable[[Any], Any]) -> Spread:
        """With `number` of each size in its place."""
        at = self.placement
        factors = (number(size) for size in (at.outer, at.length, at.inner))
        size, stride = (tuple(map(number, sizes)) for sizes in (self.size, self.stride))
        return replace(self, placement=Sharded(at.dim, *factors), size=size, stride=stride)

    @property
    def sizes(self) -> Iterator[Any]:
        """All of them."""
        yield from (self.placement.outer, self.placement.length, self.placement.inner, *self.size, *self.stride)


def same_rows(one: Spread, other: Spread) -> bool:
    """Whether the ranks hold the same tokens of both, whatever the other dims."""
    return (one.placement, one.layout, one.group) == (other.placement, other.layout, other.group)


def through_view(placement: Sharded, old: tuple[int, ...], new: tuple[int, ...]) -> Sharded | None:
    """The placement after a reshape from sizes `old` to `new`; None where the sequence is cut or merged unevenly."""
    before = prod(old[: placement.dim]) * placement.outer
    after = prod(old[placement.dim + 1 :]) * placement.inner
    for dim, size in enumerate(new):
        left, right = prod(new[:dim]), prod(new[dim + 1 :])
        if size == 1 or not left or not right or not divides(left, before) or not divides(right, after):
            continue
        if same(size, (before // left) * placement.length * (after // right)):
            return Sharded(dim, before // left, placement.length, after // right)
    return None
