"""Which rows of the sequence a rank holds.

Any length over any number of ranks: the sequence is cut into chunks whose sizes differ by at most one row, so that no
padding is needed; where there are more chunks than rows, some are empty.

A layout may have a grain, "zigzag:64": chunks end at multiples of it, as a recurrence over blocks of 64 rows wants them
to, and their sizes differ by at most one such unit. "zigzag:64x6" counts 6 units whatever the length, so the edges of
sequences that differ by some rows (padded, say) are the same; the last unit has what is more or less. "zigzag:64+3" has
as many units as there are rows for without 3 of them.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

from ringopt.context_parallel.geometry.rows import Rows, count, join
from ringopt.errors import OptionError, PlanError


@dataclass(frozen=True)
class Layout(ABC):
    """`length` rows over `ranks` ranks, cut between `units` of `grain` rows each, as many as there are rows for if not
    told; the last may be empty. Raises PlanError unless length and ranks are positive and the units fit."""

    length: int
    ranks: int
    grain: int = field(default=1, kw_only=True)
    counted: int = field(default=0, kw_only=True)

    name: ClassVar[str]
    chunks_per_rank: ClassVar[int]

    def __post_init__(self) -> None:
        if self.length < 1 or self.ranks < 1:
            raise PlanError(
                f"a layout of {self.length} rows over {self.ranks} ranks was asked for; both must be at least 1"
            )
        if self.grain < 1 or self.counted < 0 or (self.counted and self.length < self.grain * (self.counted - 1)):
            raise PlanError(f"{self.length} rows are no {self.counted} units of {self.grain} rows")

    @property
    def units(self) -> int:
        return self.counted or -(-self.length // self.grain)

    @property
    def text(self) -> str:
        """The inverse of `layout_of`."""
        units = f"x{self.counted}" if self.counted else ""
        return f"{self.name}:{self.grain}{units}" if self.grain > 1 or self.counted else self.name

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
        chunks = self.chunks_per_rank * self.ranks
        return self.length if chunk >= chunks else self.grain * (self.units * chunk // chunks)

    def chunk(self, row: int) -> int:
        """The chunk that holds `row`: the last that begins at or before it, which is never an empty one."""
        unit = min(row // self.grain, self.units - 1)
        return ((unit + 1) * self.chunks_per_rank * self.ranks - 1) // self.units

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
        return -(-self.length // self.ranks) if self.units == self.length else super().most


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
        if self.units != self.length:
            return super().most
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


# Those of a sequence that is spread, without a grain.
LAYOUTS: dict[str, type[Layout]] = {layout.name: layout for layout in (Contiguous, Zigzag)}


BY = " x "
_SPELLED = re.compile(r"([a-z]+)(?::([1-9]\d*)(?:x([1-9]\d*)|\+([1-9]\d*))?)?")


@dataclass(frozen=True)
class Spelling:
    """The name of a layout, read: `units` of `rows` each, 0 where it does not count them, for all rows but `more`."""

    kind: type[Layout]
    rows: int = 1
    units: int = 0
    more: int = 0

    def parts(self, length: int) -> int:
        """Between how many rows, or units of several, a sequence is cut; the length may be symbolic."""
        return self.units or -(-(length - self.more) // self.rows)


@lru_cache(maxsize=4096)
def layout_of(name: str, length: int, ranks: int) -> Layout:
    """The layout called `name`: of LAYOUTS, with a grain or without, or "replicated". Raises OptionError for another
    name."""
    if name == Replicated.name:
        return Replicated(length, ranks)
    cut = parsed(name)
    return cut.kind(length, ranks, grain=cut.rows, counted=cut.parts(length) if cut.more else cut.units)


def parsed(name: str) -> Spelling:
    """What the name of a layout says. Raises OptionError for one that is none."""
    found = _SPELLED.fullmatch(name) if isinstance(name, str) else None
    if found is None or found[1] not in LAYOUTS:
        known = ", ".join(map(repr, LAYOUTS))
        raise OptionError(f"layout {name!r} is unknown; the layouts are {known}, each also with a grain, 'zigzag:64'")
    return Spelling(LAYOUTS[found[1]], *(int(found[i] or least) for i, least in ((2, 1), (3, 0), (4, 0))))


def is_grained(layout: str) -> bool:
    """Whether a layout, by its name, is cut between units of several rows."""
    return ":" in layout


def chunks_per_rank(name: str) -> int:
    """Of the layout called `name`."""
    return parsed(name).kind.chunks_per_rank


def layouts_of(text: str) -> tuple[str, str]:
    """Of queries and of keys, where both are told in one: "zigzag", "zigzag x contiguous"."""
    queries, _, keys = text.partition(BY)
    return queries, keys or queries


def text_of(queries: str, keys: str) -> str:
    """The inverse of `layouts_of`."""
    return queries if queries == keys else f"{queries}{BY}{keys}"
