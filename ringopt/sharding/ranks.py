"""The ranks over which a graph is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringopt.context_parallel.geometry.layouts import Layout, chunks_per_rank, layout_of, parsed
from ringopt.context_parallel.geometry.rows import Rows, count
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.placement import Sharded
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import is_open, least_and_most, plain, same
from ringopt.torch_compat.symbolic_shapes import statically_known_true


@dataclass(frozen=True)
class Ranks:
    """Those of `mesh`, which hold the rows of a sequence that `layout(length)` gives them. `counted`: their rows are
    counted, which is refused where the ranks are known only later."""

    mesh: Mesh
    layout: Callable[[int], str]
    counted: bool = False

    @property
    def group(self) -> str:
        """The name of the mesh, which operators are given."""
        return self.mesh.name

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def asks(self) -> bool:
        """Whether the program asks for ranks and rows when it runs: no number of them may stand in the graph, and the
        rank and the size of the mesh are only examples."""
        return self.group == ANY and not self.counted

    def rows_here(self, length: int, layout: str) -> int:
        """Of this rank, of a sequence of `length`. Raises GraphRefused where the ranks are known only later."""
        if self.group == ANY:
            raise GraphRefused(Refusal("rows of a rank had to be counted, and the ranks are known only later"))
        return sum(map(len, layout_of(layout, plain(length), self.size).ranges(self.rank)))

    def laid_out(self, length: int) -> Layout:
        """Which rows of a sequence each rank has, where no open size is left in its length."""
        return layout_of(self.layout(length), plain(length), self.size)

    def least(self, length: int) -> int:
        """A sequence of `length` with fewer rows than that is not sharded."""
        return chunks_per_rank(self.layout(length)) * self.size

    def serves(self, length: int, layout: str, batched: bool) -> bool:
        """Whether an open `length` stays open: beside `batched` products only where every rank has two rows, or units
        of several, by a guard. A shorter one is compiled for itself."""
        cut = parsed(layout)
        if batched and is_open(length) and not cut.units and not cut.parts(length) >= 2 * self.size:
            int(length)
        return is_open(length)

    def same_rows(self, one: Sharded, other: Sharded) -> bool:
        """Whether every rank holds the same places of a dim by both."""
        if not same(one.outer, other.outer) or not same(one.size, other.size):
            return False
        if self.asks or any(is_open(place.length) or is_open(place.inner) for place in (one, other)):
            return self.same_units(one, other)
        return self.blocks(one) == self.blocks(other)

    def same_units(self, one: Sharded, other: Sharded) -> bool:
        """Whether both are cut between as many units of as many places, whatever their lengths and the ranks."""
        first, second = (parsed(self.layout(place.length)) for place in (one, other))
        alike = same(first.rows * one.inner, second.rows * other.inner) and first.kind is second.kind
        return alike and same(first.parts(one.length), second.parts(other.length))

    def blocks(self, place: Sharded) -> list[Rows]:
        """Of every rank, which of length * inner places it holds."""
        ranges = map(self.laid_out(place.length).ranges, range(self.size))
        return [tuple(range(x.start * place.inner, x.stop * place.inner) for x in of_rank) for of_rank in ranges]


def two_rows_each(length: int, layout: str, ranks: int) -> bool:
    """Whether every rank surely has two rows, whatever an open length is: Inductor (torch 2.13) lowers no batched
    product of rows that may be one. Of two units only the last may be shorter; and of units that are counted only the
    last has more where there are more rows."""
    cut = parsed(layout)
    if not cut.units:
        return bool(statically_known_true(cut.parts(length) >= 2 * ranks))
    fewest = layout_of(layout, least_and_most(length)[0], ranks)
    return all(count(fewest.ranges(rank)) >= 2 for rank in range(ranks))
