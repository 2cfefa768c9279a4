"""The ranks over which a graph is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ringopt.context_parallel.geometry.layouts import LAYOUTS, layout_of
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import plain


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

    def least(self, length: int) -> int:
        """A sequence of `length` with fewer rows than that is not sharded."""
        return LAYOUTS[self.layout(length)].chunks_per_rank * self.size
