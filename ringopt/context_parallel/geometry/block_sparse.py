"""Block-sparse attention: which blocks of keys each block of queries sees, as a list (Child et al., Generating Long
Sequences with Sparse Transformers, 2019; Zaheer et al., Big Bird, 2020)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ringopt.context_parallel.geometry.pattern import Full, Kind, Pattern, Tile
from ringopt.context_parallel.geometry.rows import Rows, count, hull, join, meet
from ringopt.errors import PlanError

# Blocks of queries are computed several at a time up to as many rows, for a kernel would idle between small ones.
STRIP = 256


@dataclass(frozen=True)
class Blocks(Pattern):
    """Query t sees the keys in the blocks that are listed for its own block of queries, when causal those up to itself.

    `sizes`: queries and keys of a block; the last ones may have fewer. `table`: for each block of queries, separated by
    ";", the stretches of blocks of keys that it sees, ascending and apart: "0:1;0:2;0:1+3:5".
    """

    near = False

    sizes: tuple[int, int] = (1, 1)
    table: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.sizes) < 1:
            raise PlanError(f"blocks of {self.sizes[0]} queries x {self.sizes[1]} keys were asked for; both at least 1")
        lengths = zip((self.q_length, self.kv_length), self.sizes, strict=True)
        rows, keys = (-(-length // size) for length, size in lengths)
        apart = all(a.stop < b.start for runs in self.listed for a, b in pairwise(runs))
        within = all(run and run.stop <= keys for runs in self.listed for run in runs)
        if len(self.listed) != rows or not apart or not within:
            raise PlanError(
                f"a list for {rows} blocks of queries and {keys} of keys was expected, of stretches ascending and "
                f"apart; found one for {len(self.listed)} blocks of queries: {self.table[:60]!r}"
            )

    @property
    def text(self) -> str:
        queries, keys = self.sizes
        return f"blocks({queries}x{keys};{self.table}{'' if self.causal else ',both'})"

    @cached_property
    def listed(self) -> tuple[Rows, ...]:
        """The table: of each block of queries, stretches of blocks of keys."""
        return tuple(
            tuple(range(*map(int, run.split(":"))) for run in block.split("+") if run)
            for block in self.table.split(";")
        )

    @cached_property
    def runs(self) -> tuple[Rows, ...]:
        """The same in rows of keys."""
        size, stop = self.sizes[1], self.kv_length
        return tuple(
            tuple(range(run.start * size, min(run.stop * size, stop)) for run in listed) for listed in self.listed
        )

    def each(self, queries: range) -> Iterator[tuple[range, Rows]]:
        """`queries` by blocks, with the keys that are listed for each."""
        size, start = self.sizes[0], queries.start
        while start < queries.stop:
            number = start // size
            some = range(start, min((number + 1) * size, queries.stop))
            yield some, self.runs[number]
            start = some.stop

    def needed(self, queries: range) -> Rows:
        return join(
            meet(run, range(some.stop if self.causal else self.kv_length))
            for some, runs in self.each(queries)
            for run in runs
        )

    def needs(self, queries: range) -> range:
        return hull(self.needed(queries))

    def span(self, query: int) -> range:
        """With the holes."""
        return self.needs(range(query, query + 1))

    @cached_property
    def blind(self) -> bool:
        first = (some.start for some, _ in self.each(range(self.q_length)))  # of its block, when causal it sees least
        return any(not self.needed(range(query, query + 1)) for query in first)

    def used(self, keys: range) -> Rows:
        return join(
            range(max(some.start, met.start) if self.causal else some.start, some.stop)
            for some, runs in self.each(range(self.q_length))
            if (met := next(filter(len, (meet(run, keys) for run in runs)), None))
            and (met.start < some.stop or not self.causal)
        )

    def users(self, keys: range) -> range:
        return hull(self.used(keys))

    def pairs(self, queries: range, keys: range) -> int:
        return self._pairs(queries, keys, self.causal)

    def _pairs(self, queries: range, keys: range, causal: bool) -> int:
        within = Full(self.q_length, self.kv_length, causal)
        return sum(within.pairs(some, meet(keys, run)) for some, runs in self.each(queries) for run in runs)

    def kind(self, queries: range, keys: range) -> Kind:
        pairs, rows = self.pairs(queries, keys), len(queries)
        if not pairs:
            return Kind.EMPTY
        if pairs == rows * len(keys):
            return Kind.FULL
        triangle = queries == keys and pairs == rows * (rows + 1) // 2 == self._pairs(queries, keys, True)
        return Kind.CAUSAL if triangle else Kind.PARTIAL

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        """By strips of queries, each with the stretches of keys that it needs."""
        within = Full(self.q_length, self.kv_length, self.causal)
        for strip, single in self._strips(queries, keys):
            for some in filter(len, (meet(keys, run) for run in self.needed(strip))):
                if single:
                    yield from within.tiles(strip, some)
                elif (kind := self.kind(strip, some)) is not Kind.EMPTY:
                    yield strip, some, kind

    def _strips(self, queries: range, keys: range) -> Iterator[tuple[range, bool]]:
        """Blocks of queries that are computed at once, and whether it is a single one: STRIP rows at most, and only
        while at least half of what is computed is seen."""
        strip, single = range(queries.start, queries.start), True
        for some, _ in self.each(queries):
            more = range(strip.start, some.stop)
            if strip and (len(more) > STRIP or 2 * self.pairs(more, keys) < self._area(more, keys)):
                yield strip, single
                strip, single = some, True
            else:
                strip, single = more, not strip
        if strip:
            yield strip, single

    def _area(self, queries: range, keys: range) -> int:
        return len(queries) * count(meet(keys, run) for run in self.needed(queries))


RUNS = r"(?:\d+:\d+(?:\+\d+:\d+)*)?"
BLOCKS = re.compile(rf"blocks\((\d+)x(\d+);({RUNS}(?:;{RUNS})*)(,both)?\)")


def blocks_of(text: str, q_length: int, kv_length: int) -> Blocks | None:
    """See parse.pattern_of; None for a text of another form."""
    if found := BLOCKS.fullmatch(text):
        return Blocks(q_length, kv_length, found[4] is None, (int(found[1]), int(found[2])), found[3])
    return None
