"""Which rows of the sequence a rank holds.

Any length over any number of ranks: the sequence is cut into chunks whose sizes differ by at most one row, so that no
padding is needed; where there are more chunks than rows, some are empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from ringopt.context_parallel.geometry.rows import Rows, count, join
from ringopt.errors import OptionError, PlanError


@dataclass(frozen=True)
class Layout(ABC):
    """`length` rows over `ranks` ranks. Raises PlanError unless both are positive."""

    length: int
    ranks: int

    name: ClassVar[str]
    chunks_per_rank: ClassVar[int]

    def __post_init__(self) -> None:
        if self.length < 1 or self.ranks < 1:
            raise PlanError(
                f"a layout of {self.length} rows over {self.ranks} ranks was asked for; both must be at least 1"
            )

    @abstractmethod
    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that `rank` holds, ascending."""

    @abstractmethod
    def holder(self, chunk: int) -> int:
        """The rank that holds `chunk`."""

    @property
    def most(self) -> int:
        """Rows of the rank that holds most."""
        return max(count(self.ranges(rank)) for rank in range(self.ranks))

    def ranges(self, rank: int) -> Rows:
        """The rows of `rank`, ascending, in the order of its local tensor; chunks that touch are one range, and a rank
        whose chunks are all empty has none."""
        return join(range(self.edge(chunk), self.edge(chunk + 1)) for chunk in self.chunks(rank))

    def edge(self, chunk: int) -> int:
        """The row with which `chunk` begins."""
        return self.length * chunk // (self.chunks_per_rank * self.ranks)

    def chunk(self, row: int) -> int:
        """The chunk that holds `row`: the last that begins at or before it, which is never an empty one."""
        return ((row + 1) * self.chunks_per_rank * self.ranks - 1) // self.length

    def owner(self, row: int) -> int:
        """The rank that holds `row`."""
        return self.holder(self.chunk(row))

    def owners(self, rows: range) -> set[int]:
        """Every rank that holds one of `rows`, and no other."""
        if not rows:
            return set()
        chunks = range(self.chunk(rows[0]), self.chunk(rows[-1]) + 1)
        return {self.holder(chunk) for chunk in chunks if self.edge(chunk) < self.edge(chunk + 1)}


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r of p holds rows n*r//p to n*(r+1)//p."""

    name = "contiguous"
    chunks_per_rank = 1

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (rank,)

    def holder(self, chunk: int) -> int:
        return chunk

    @property
    def most(self) -> int:
        return -(-self.length // self.ranks)


@dataclass(frozen=True)
class Zigzag(Layout):
    """Rank r of p holds chunks r (its head) and 2p-1-r (its tail) of 2p, so that causal work is equal on all ranks.

    The head-tail order of Zhu's ring-flash-attention and of PyTorch's context parallel load balancer, here without
    their condition that 2p divides the length.
    """

    name = "zigzag"
    chunks_per_rank = 2

    def chunks(self, rank: int) -> tuple[int, ...]:
        return (rank, 2 * self.ranks - 1 - rank)

    def holder(self, chunk: int) -> int:
        return min(chunk, 2 * self.ranks - 1 - chunk)

    @property
    def most(self) -> int:
        """`over` of the 2p chunks have a row more: chunk c where a multiple of 2p / over is above c and at most c + 1.
        So has its mirror image, the other chunk of the rank, where that multiple is no whole number."""
        each, over = divmod(self.length, 2 * self.ranks)
        return 2 * each + (2 if over and 2 * self.ranks % over else min(over, 1))


@dataclass(frozen=True)
class Replicated(Layout):
    """Every rank holds all rows: of queries or keys too few to be spread. No row has an owner."""

    name = "replicated"
    chunks_per_rank = 1

    def ranges(self, rank: int) -> Rows:
        return (range(self.length),)

    def chunks(self, rank: int) -> tuple[int, ...]:
        return tuple(range(self.ranks))

    def holder(self, chunk: int) -> int:
        raise PlanError(f"the {self.length} rows are on all {self.ranks} ranks, and were asked for by their owner")

    def owners(self, rows: range) -> set[int]:
        return set()


# Those of a sequence that is spread.
LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Contiguous, Zigzag)}


BY = " x "


@lru_cache(maxsize=4096)
def layout_of(name: str, length: int, ranks: int) -> Layout:
    """The layout called `name`: of LAYOUTS, or "replicated". Raises OptionError for another name."""
    if name == Replicated.name:
        return Replicated(length, ranks)
    if name not in LAYOUTS:
        raise OptionError(f"layout {name!r} is unknown; the layouts are {', '.join(map(repr, LAYOUTS))}")
    return LAYOUTS[name](length, ranks)


def layouts_of(text: str) -> tuple[str, str]:
    """Of queries and of keys, where both are told in one: "zigzag", "zigzag x contiguous"."""
    queries, _, keys = text.partition(BY)
    return queries, keys or queries


def text_of(queries: str, keys: str) -> str:
    """The inverse of `layouts_of`."""
    return queries if queries == keys else f"{queries}{BY}{keys}"
