"""Patterns of programs that cut the sequence in pieces, and patterns made of others side by side."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ringopt.context_parallel.geometry.pattern import Full, Kind, Pattern, Tile, Window
from ringopt.context_parallel.geometry.rows import Rows, hull, inside, join, meet
from ringopt.context_parallel.geometry.strided import Strided, strided_of
from ringopt.errors import PlanError

# Segments of fewer rows are computed several at a time, under a mask: a kernel would idle between them.
STRIP = 256


@dataclass(frozen=True)
class Cut(Pattern, ABC):
    """Row t sees the rows of its own segment, when causal those up to itself. Segments follow one another."""

    near = True

    @abstractmethod
    def segment(self, row: int) -> range:
        """The segment of `row`, which may be past the last key."""

    def span(self, query: int) -> range:
        segment = self.segment(query)
        stop = min(query + 1 if self.causal else segment.stop, self.kv_length)
        return range(min(segment.start, self.kv_length), stop)

    def users(self, keys: range) -> range:
        if not keys:
            return range(0)
        start = keys[0] if self.causal else self.segment(keys[0]).start
        return range(min(start, self.q_length), min(self.segment(keys[-1]).stop, self.q_length))

    def cut(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        """By segments, each as a causal tile is cut; short ones in strips."""
        start = queries.start
        while start < queries.stop:
            stop = min(self.segment(start).stop, queries.stop)
            whole = stop - start >= STRIP
            while not whole and stop < queries.stop and (end := self.segment(stop).stop) - start <= STRIP:
                stop = min(end, queries.stop)
            some = range(start, stop)
            if self.causal and self.segment(start) == self.segment(stop - 1):
                yield from Full(self.q_length, self.kv_length, True).cut(some, meet(keys, self.segment(start)))
            else:
                yield some, keys
            start = stop

    def pairs(self, queries: range, keys: range) -> int:
        within, total, start = Full(self.q_length, self.kv_length, self.causal), 0, queries.start
        while start < queries.stop:
            segment = self.segment(start)
            total += within.pairs(range(start, min(segment.stop, queries.stop)), meet(keys, segment))
            start = segment.stop
        return total


@dataclass(frozen=True)
class Chunked(Cut):
    """Segments of `size` rows each, as in chunked attention."""

    size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise PlanError(f"chunks of {self.size} rows were asked for; a chunk has at least 1")

    @property
    def text(self) -> str:
        return f"chunked({self.size}{'' if self.causal else ',both'})"

    def segment(self, row: int) -> range:
        start = row // self.size * self.size
        return range(start, start + self.size)


@dataclass(frozen=True)
class Documents(Cut):
    """Documents packed in one sequence: number i is rows edges[i] to edges[i + 1]."""

    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = (self.edges[:1], self.edges[-1:]) == ((0,), (self.q_length,)) and self.q_length == self.kv_length
        if not ends or any(start >= stop for start, stop in pairwise(self.edges)):
            raise PlanError(
                f"documents of {self.q_length} queries and {self.kv_length} keys were given edges {list(self.edges)}; "
                "they ascend from 0 to the length of both"
            )

    @property
    def text(self) -> str:
        return f"documents({','.join(map(str, self.edges))}{'' if self.causal else ',both'})"

    def segment(self, row: int) -> range:
        number = bisect_right(self.edges, row)
        return range(self.edges[number - 1], self.edges[number])


@dataclass(frozen=True)
class TwoStretches(Pattern, ABC):
    """The keys in two stretches, each seen by a pattern of its own. Seen keys of a query may have a hole between."""

    near = False

    @cached_property
    @abstractmethod
    def parts(self) -> tuple[tuple[range, Pattern], tuple[range, Pattern]]:
        """Neighbouring ranges of all keys, and who sees them."""

    def each(self, keys: range) -> Iterator[tuple[range, Pattern]]:
        """`keys` by parts."""
        for stretch, pattern in self.parts:
            if some := inside(keys, stretch):
                yield some, pattern

    def span(self, query: int) -> range:
        """With the hole."""
        return self.needs(range(query, query + 1))

    def needs(self, queries: range) -> range:
        return hull(self.needed(queries))

    def needed(self, queries: range) -> Rows:
        parts = ((stretch, rows) for stretch, pattern in self.parts for rows in pattern.needed(queries))
        return join(meet(stretch, rows) for stretch, rows in parts)

    def narrowed(self, queries: range, keys: range) -> range:
        parts = [some for part, pattern in self.each(keys) if (some := pattern.narrowed(queries, part))]
        return range(parts[0].start, parts[-1].stop, keys.step) if parts else keys[:0]

    def users(self, keys: range) -> range:
        return hull(self.used(keys))

    def used(self, keys: range) -> Rows:
        return join(rows for some, pattern in self.each(keys) for rows in pattern.used(some))

    @property
    def blind(self) -> bool:
        """Never: all queries see the first key."""
        return False

    def pairs(self, queries: range, keys: range) -> int:
        return sum(pattern.pairs(queries, some) for some, pattern in self.each(keys))

    def kind(self, queries: range, keys: range) -> Kind:
        found = list(self.each(keys))
        if len(found) == 1:
            return found[0][1].kind(queries, keys)
        pairs, rows = self.pairs(queries, keys), len(queries)
        if not pairs:
            return Kind.EMPTY
        if pairs == rows * len(keys):
            return Kind.FULL
        # All patterns here see all of the lower triangle or nothing above it, so that as many pairs are those pairs.
        triangle = self.causal and queries == keys and pairs == rows * (rows + 1) // 2
        return Kind.CAUSAL if triangle else Kind.PARTIAL

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        for some, pattern in self.each(keys):
            yield from pattern.tiles(queries, some)


@dataclass(frozen=True)
class Prefix(TwoStretches):
    """The first `length` keys are seen by all, the others by the queries from theirs on (prefix LM)."""

    length: int = 1

    @property
    def text(self) -> str:
        return f"prefix({self.length})"

    @cached_property
    def parts(self) -> tuple[tuple[range, Pattern], tuple[range, Pattern]]:
        queries, keys, first = self.q_length, self.kv_length, min(self.length, self.kv_length)
        return (range(first), Full(queries, keys)), (range(first, keys), Full(queries, keys, causal=True))


@dataclass(frozen=True)
class Sinks(TwoStretches):
    """A window, of every `rate`-th key, and the first `sinks` keys beside it (Xiao et al., StreamingLLM, 2023)."""

    width: int = 1
    sinks: int = 1
    rate: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 1:
            raise PlanError(
                f"a window beside {self.sinks} sinks was asked for; it has at least 1, or is a window alone"
            )

    @property
    def text(self) -> str:
        rate = f",rate={self.rate}" if self.rate > 1 else ""
        return f"window({self.width}{'' if self.causal else ',both'},sinks={self.sinks}{rate})"

    @cached_property
    def parts(self) -> tuple[tuple[range, Pattern], tuple[range, Pattern]]:
        queries, keys, causal, first = self.q_length, self.kv_length, self.causal, min(self.sinks, self.kv_length)
        near: Pattern = Window(queries, keys, causal, self.width)
        if self.rate > 1:
            near = Strided(queries, keys, causal, self.width, self.rate)
        return (range(first), Full(queries, keys, causal)), (range(first, keys), near)


SINKS, PREFIX = re.compile(r"window\((\d+)(,both)?,sinks=(\d+)(,rate=(\d+))?\)"), re.compile(r"prefix\((\d+)\)")
CHUNKED, DOCUMENTS = re.compile(r"chunked\((\d+)(,both)?\)"), re.compile(r"documents\(([\d,]*\d)(,both)?\)")


def structure_of(text: str, q_length: int, kv_length: int) -> Pattern | None:
    """See parse.pattern_of; None for a text of another form."""
    if found := SINKS.fullmatch(text):
        return Sinks(q_length, kv_length, found[2] is None, int(found[1]), int(found[3]), int(found[5] or 1))
    if (strided := strided_of(text, q_length, kv_length)) is not None:
        return strided
    if found := PREFIX.fullmatch(text):
        return Prefix(q_length, kv_length, True, int(found[1]))
    if found := CHUNKED.fullmatch(text):
        return Chunked(q_length, kv_length, found[2] is None, int(found[1]))
    if found := DOCUMENTS.fullmatch(text):
        return Documents(q_length, kv_length, found[2] is None, tuple(map(int, found[1].split(","))))
    return None
