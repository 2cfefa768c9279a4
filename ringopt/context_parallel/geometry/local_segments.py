"""Attention within segments of any lengths, and shards of any lengths: what is left of a dilated sequence to exchange.

Rows here are numbered without the ones that are left out, so they come in ranges of step 1, as everywhere in a plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.context_parallel.geometry.pattern import Full, Pattern
from ringopt.context_parallel.geometry.rows import Rows, meet


@dataclass(frozen=True)
class Segments(Pattern):
    """Row t sees its own segment, when causal the rows s <= t of it. Segment i is edges[i] to edges[i + 1]."""

    near = True

    edges: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return f"segments({','.join(map(str, self.edges))})"

    def segment(self, row: int) -> range:
        """The segment of `row`."""
        number = bisect_right(self.edges, row)
        return range(self.edges[number - 1], self.edges[number])

    def cuts(self, rows: range) -> Iterator[range]:
        """`rows` by segments."""
        start = rows.start
        while start < rows.stop:
            stop = min(self.segment(start).stop, rows.stop)
            yield range(start, stop)
            start = stop

    def keep(self, rows: range) -> Rows:
        return tuple(self.cuts(rows))

    def span(self, query: int) -> range:
        segment = self.segment(query)
        return range(segment.start, query + 1) if self.causal else segment

    def users(self, keys: range) -> range:
        if not keys:
            return range(0)
        return range(keys[0] if self.causal else self.segment(keys[0]).start, self.segment(keys[-1]).stop)

    def cut(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        """By segments, and each as a causal tile is cut."""
        for some in self.cuts(queries):
            yield from Full(self.q_length, self.kv_length, True).cut(some, meet(keys, self.segment(some.start)))

    def pairs(self, queries: range, keys: range) -> int:
        within = Full(self.q_length, self.kv_length, self.causal)
        return sum(within.pairs(some, meet(keys, self.segment(some.start))) for some in self.cuts(queries))


@dataclass(frozen=True)
class Pieces(Layout):
    """Piece i, rows edges[i] to edges[i + 1], is held by rank holders[i]."""

    edges: tuple[int, ...]
    holders: tuple[int, ...]

    name = "pieces"

    def chunks(self, rank: int) -> tuple[int, ...]:
        return tuple(piece for piece, holder in enumerate(self.holders) if holder == rank)

    def holder(self, chunk: int) -> int:
        return self.holders[chunk]

    def edge(self, chunk: int) -> int:
        return self.edges[chunk]

    def chunk(self, row: int) -> int:
        return bisect_right(self.edges, row) - 1
