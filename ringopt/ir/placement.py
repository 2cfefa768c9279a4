"""Where the rows of a value are: on every rank (None), or sharded along one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from ringopt.ir.symbolic_sizes import divides, formula, same


@dataclass(frozen=True, eq=False)
class Sharded:
    """Dim `dim` has outer * length * inner places; the factor `length`, a sequence, is spread over the ranks.
    Each may be an open size.

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

    def fixed(self) -> Sharded:
        """The same with numbers for open sizes; another length compiles another graph."""
        return Sharded(self.dim, int(self.outer), int(self.length), int(self.inner))

    def at(self, dim: int) -> Sharded:
        return replace(self, dim=dim)

    def __str__(self) -> str:
        factors = "" if self.outer == self.inner == 1 else f" of {self.outer}x{self.length}x{self.inner}"
        return f"S({self.dim}{factors})"


@dataclass(frozen=True)
class Layouts:
    """The layout of each sequence, by its length: values of equally many rows line up, whatever they were cut from.

    `axes`: of sequences that are attended over, length and layout. What is cut from one, or joined, has the layout of
    the nearest; with none of a known length, and of an open one, `name`. A guard may fix a length later: by its formula
    it is looked for as that is now.
    """

    name: str = "contiguous"
    axes: tuple[tuple[int, str], ...] = ()

    def of(self, length: int) -> str:
        at, axes = formula(length), {formula(axis): layout for axis, layout in self.axes}
        if at in axes:
            return axes[at]
        known = [axis for axis in axes if isinstance(axis, int)] if isinstance(at, int) else []
        return axes[min(known, key=lambda axis: (abs(axis - at), axis))] if known else self.name


@dataclass(frozen=True)
class Spread:
    """How a tensor of `size` and `stride` is spread over the ranks of the mesh called `group`; `name` is for errors."""

    placement: Sharded
    layout: str
    group: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    name: str = field(compare=False)


def same_rows(one: Spread, other: Spread) -> bool:
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
