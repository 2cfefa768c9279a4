"""Bands of every `rate`-th key: dilated windows (Beltagy et al., Longformer, 2020; Hassani and Shi, DiNA, 2022) and
strided attention (Child et al., Sparse Transformers, 2019).

    query t sees s  iff  s - t is a multiple of `rate`, and the band sees (s - t) / rate

So rows fall into `rate` classes that never meet, and each class alone is a shorter sequence under a plain band: every
question is answered by the band, for all classes that see it alike at once. Tiles are of one class, their rows `rate`
apart, and need no other mask than the band's.

    window(3,rate=2)    query 7 sees 7, 5, 3    class 1: rows 1 3 5 7, of which the query is number 3 and sees 3, 2, 1
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ringopt.context_parallel.geometry.pattern import Band, Full, Kind, Pattern, Tile, Window
from ringopt.context_parallel.geometry.rows import Rows, join, meet
from ringopt.errors import PlanError

# Queries whose classes are computed together, or a quarter of a window if that is more.
STRIP = 512

# Of all classes that see a tile alike: the classes, and each of the tile's sides as numbers within such a class.
Alike = tuple[range, tuple[range, ...]]


@dataclass(frozen=True)
class Strided(Pattern):
    """Of `width` keys, `rate` rows apart, or of as many as there are (None).

    Classes of fewer rows than `least` in a tile are computed together, under a mask: a kernel would idle between them.
    """

    width: int | None = None
    rate: int = 1
    least: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate < 1:
            raise PlanError(f"every {self.rate}-th key was asked for; the rate is at least 1")
        _ = self.band  # which refuses a width below 1

    @cached_property
    def band(self) -> Band:
        """Over the rows of one class: as many as the first has, which is never shorter than another."""
        queries, keys = -(-self.q_length // self.rate), -(-self.kv_length // self.rate)
        if self.width is None:
            return Full(queries, keys, self.causal)
        return Window(queries, keys, self.causal, self.width)

    @property
    def near(self) -> bool:
        return self.width is not None

    @property
    def text(self) -> str:
        text = self.band.text.removesuffix(")")
        return f"{text}{'(' if self.width is None else ','}rate={self.rate})"

    @property
    def blind(self) -> bool:
        return any(not self.span(query) for query in range(max(self.q_length - self.rate, 0), self.q_length))

    def span(self, query: int) -> range:
        return self.needs(range(query, query + 1))

    def needs(self, queries: range) -> range:
        return self._hull(self.alike(queries), self.band.needs, self.kv_length)

    def needed(self, queries: range) -> Rows:
        return self._rows(self.alike(queries), self.band.needs, self.kv_length)

    def users(self, keys: range) -> range:
        return self._hull(self.alike(keys), self.band.users, self.q_length)

    def used(self, keys: range) -> Rows:
        return self._rows(self.alike(keys), self.band.users, self.q_length)

    def pairs(self, queries: range, keys: range) -> int:
        return sum(len(classes) * self.band.pairs(*sides) for classes, sides in self.alike(queries, keys))

    def kind(self, queries: range, keys: range) -> Kind:
        pairs, rows = self.pairs(queries, keys), len(queries)
        if not pairs:
            return Kind.EMPTY
        if pairs == rows * len(keys):
            return Kind.FULL
        triangle = self.causal and queries == keys and pairs == rows * (rows + 1) // 2
        return Kind.CAUSAL if triangle else Kind.PARTIAL

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        queries, keys = meet(queries, self.users(keys)), meet(keys, self.needs(queries))
        if min(len(queries), len(keys)) < self.least * self.rate:
            yield from self._together(queries, keys)
            return
        for number in range(self.rate):
            mine, theirs = (numbered(rows, number, self.rate) for rows in (queries, keys))
            for some, others, kind in self.band.tiles(mine, theirs):
                yield self._spread(some, number), self._spread(others, number), kind

    def alike(self, *sides: range) -> Iterator[Alike]:
        """Each class sees the sides as ranges of its own rows; these are equal but where a side begins or ends."""
        strided = [rows for rows in sides if rows.step > 1]
        if strided:
            number = strided[0].start % self.rate
            yield range(number, number + 1), tuple(numbered(rows, number, self.rate) for rows in sides)
            return
        edges = {edge % self.rate for rows in sides for edge in (rows.start, rows.stop)}
        for first, last in pairwise(sorted({0, self.rate, *edges})):
            yield range(first, last), tuple(numbered(rows, first, self.rate) for rows in sides)

    def _together(self, queries: range, keys: range) -> Iterator[Tile]:
        """Strips of all classes, each with the keys that it needs."""
        strip = max(STRIP, (self.width or 0) * self.rate // 4)
        for first in range(0, len(queries), strip):
            some = queries[first : first + strip]
            others = meet(keys, self.needs(some))
            if (kind := self.kind(some, others)) is not Kind.EMPTY:
                yield some, others, kind

    def _spread(self, numbers: range, number: int) -> range:
        """Rows of a class by their numbers in it: the inverse of `numbered`."""
        start = number + numbers.start * self.rate
        return range(start, start + (len(numbers) - 1) * self.rate + 1, self.rate)

    def _rows(self, alike: Iterator[Alike], see: Callable[[range], range], length: int) -> Rows:
        """What the band sees of `length` rows, in all classes."""
        pieces = ((classes, see(numbers)) for classes, (numbers,) in alike)
        return join(piece for classes, seen in pieces for piece in self._pieces(classes, seen, length))

    def _hull(self, alike: Iterator[Alike], see: Callable[[range], range], length: int) -> range:
        """From the first to the last of these. The last number of a class may be past the last row."""
        pieces = ((classes, see(numbers)) for classes, (numbers,) in alike)
        ends = [end for classes, seen in pieces for end in self._pieces(classes, {*seen[:1], *seen[-2:]}, length)]
        return range(min(end.start for end in ends), max(end.stop for end in ends)) if ends else range(0)

    def _pieces(self, classes: range, numbers: Iterable[int], length: int) -> Iterator[range]:
        for start in (number * self.rate for number in numbers):
            if start + classes.start < length:
                yield range(start + classes.start, min(start + classes.stop, length))


def numbered(rows: range, number: int, rate: int) -> range:
    """Those of `rows` that are in class `number`, counted within it. The rows have step 1 or `rate`."""
    if rows.step > 1 and rows.start % rate != number:
        return range(0)
    first = -(-(rows.start - number) // rate)
    return range(first, first + len(rows) if rows.step > 1 else -(-(rows.stop - number) // rate))


STRIDED = re.compile(r"(full|causal)\(rate=(\d+)\)|window\((\d+)(,both)?,rate=(\d+)\)")


def strided_of(text: str, q_length: int, kv_length: int) -> Strided | None:
    """See parse.pattern_of; None for a text of another form."""
    found = STRIDED.fullmatch(text)
    if found is None:
        return None
    if found[1]:
        return Strided(q_length, kv_length, found[1] == "causal", None, int(found[2]))
    return Strided(q_length, kv_length, found[4] is None, int(found[3]), int(found[5]))
