"""Which way keys and values travel: all that a strategy says.

A route takes one piece of rows from its home past a number of ranks, an equal stride apart. Steps, messages, buffers
and the whole backward follow from the routes (exchange.py), so a new strategy is a new way to yield routes and nothing
else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.context_parallel.geometry.pattern import Pattern
from ringopt.context_parallel.geometry.rows import Rows

Needed = Mapping[int, Rows]  # user -> the rows of one piece that its queries see, for every rank but the piece's home


@dataclass(frozen=True)
class Route:
    """`rows` of `home` stop at home + stride, home + 2 stride, ... (mod p): at `hops` ranks in all.

    Stops before hop `first` need no rows; they only pass them on. A stride other than 1 or -1 makes one hop.
    """

    rows: range
    home: int
    stride: int
    hops: int
    first: int = 1

    def stop(self, hop: int, ranks: int) -> int:
        """The rank that is reached with `hop`; hop 0 is home."""
        return (self.home + hop * self.stride) % ranks

    def hop_of(self, rank: int, ranks: int) -> int | None:
        """The hop with which `rank` is reached, None where it is not."""
        if self.hops == 1:
            return {self.home: 0, self.stop(1, ranks): 1}.get(rank)
        hop = (rank - self.home) * self.stride % ranks
        return hop if hop <= self.hops else None


class RouteRequest(Protocol):
    """What a strategy is to serve: of a plan (exchange.py) the part that no strategy has a say in."""

    @property
    def queries_move(self) -> bool: ...
    @property
    def pattern(self) -> Pattern: ...
    @property
    def q_layout(self) -> Layout: ...
    @property
    def kv_layout(self) -> Layout: ...
    @property
    def ranks(self) -> int: ...
    @property
    def merges(self) -> bool: ...
    def missing(self, rank: int) -> Rows:
        """The rows that `rank` needs and does not hold."""
        ...


class Strategy(ABC):
    """A frozen dataclass whose fields are its options."""

    direct: ClassVar[bool]  # every route has one hop, so that it concerns its two ends only
    moves_nothing: ClassVar[bool] = False

    @abstractmethod
    def routes(self, home: int, needed: Needed, ranks: int) -> Iterator[Route]:
        """The routes of one piece: to each user of `needed` at least the rows that it needs."""

    @abstractmethod
    def most_rows(self, shard: int, backward: bool) -> int | None:
        """The most rows that a rank buffers beside its own at any time, `shard` being the largest share of a rank; None
        where no fixed number of shards bounds it. Holds for keys and for gradients: remote rows held, rows on their
        way in, and a rank's own rows on their way out."""

    def refusal(self, asked: RouteRequest) -> str:
        """Why this strategy is none for the pattern and the layouts of `asked`, or ""."""
        return ""
