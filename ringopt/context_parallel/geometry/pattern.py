"""Which keys a query sees, as far as it shapes the exchange.

In a pattern each query sees one span of keys, and neither end of the span ever moves back along the sequence. So all
questions of a planner (who sees whom, is a tile full, how many pairs has it) are answered from the corners of a tile,
at any length in constant time. Here are bands, where query t sees the keys s with `low <= s - t < high`; segmented.py
has segments, and patterns made of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ringopt.context_parallel.geometry.rows import Rows, inside, join, meet
from ringopt.errors import PlanError


class Kind(Enum):
    """What part of a tile of queries x keys is seen."""

    EMPTY = "empty"  # nothing: neither sent nor computed
    FULL = "full"  # every pair
    CAUSAL = "causal"  # query rows = key rows, lower triangle: the one triangle that all kernels read alike
    PARTIAL = "partial"  # some pairs: the kernel needs a mask


Tile = tuple[range, range, Kind]


@dataclass(frozen=True)
class Pattern(ABC):
    """`q_length` queries over `kv_length` keys; a causal one hides the keys s > t from query t.

    Lengths may differ: positions are then counted from the first row on both sides (upper-left alignment), as
    `F.scaled_dot_product_attention(is_causal=True)` documents it.
    """

    q_length: int
    kv_length: int
    causal: bool = False

    def __post_init__(self) -> None:
        if self.q_length < 1 or self.kv_length < 1:
            raise PlanError(
                f"attention of {self.q_length} queries over {self.kv_length} keys was asked for; "
                "both must be at least 1"
            )

    @property
    @abstractmethod
    def near(self) -> bool:
        """Whether no key is seen from however far behind it."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What `pattern_of` reads."""

    @abstractmethod
    def span(self, query: int) -> range:
        """The keys that `query` sees; empty where a window has passed the last key."""

    @abstractmethod
    def users(self, keys: range) -> range:
        """From the first to the last query that sees some of `keys`."""

    @abstractmethod
    def pairs(self, queries: range, keys: range) -> int:
        """How many (query, key) pairs of the tile are seen."""

    def cut(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        """Cuts a PARTIAL tile so that less is computed or masked; the parts may still hold hidden rows."""
        yield queries, keys

    def keep(self, rows: range) -> Rows:
        """The pieces of `rows` that take part in the attention: here all, uncut."""
        return (rows,) if rows else ()

    def needs(self, queries: range) -> range:
        """From the first to the last key that some of `queries` sees."""
        return range(self.span(queries[0]).start, self.span(queries[-1]).stop) if queries else range(0)

    def narrowed(self, queries: range, keys: range) -> range:
        """Of `keys`, of any step, from the first to the last that some of `queries` sees."""
        return inside(keys, self.needs(queries))

    def needed(self, queries: range) -> Rows:
        """`needs`, without holes that a pattern may have."""
        return join([self.needs(queries)])

    def used(self, keys: range) -> Rows:
        """`users`, without holes that a pattern may have."""
        return join([self.users(keys)])

    @property
    def blind(self) -> bool:
        """Whether some query sees no key: the last does not, where any is so."""
        return not self.span(self.q_length - 1)

    def kind(self, queries: range, keys: range) -> Kind:
        """What part of the tile is seen."""
        if not queries or not keys:
            return Kind.EMPTY
        first, last = self.span(queries[0]), self.span(queries[-1])
        if not meet(keys, range(first.start, last.stop)):
            return Kind.EMPTY
        if last.start > keys[0]:
            return Kind.PARTIAL
        if keys[-1] < first.stop:
            return Kind.FULL
        triangle = self.causal and queries == keys and first.stop == queries[0] + 1
        return Kind.CAUSAL if triangle else Kind.PARTIAL

    def tiles(self, queries: range, keys: range) -> Iterator[Tile]:
        """The seen part of `queries` x `keys` as disjoint tiles, without the rows that meet nothing."""
        queries, keys = meet(queries, self.users(keys)), meet(keys, self.needs(queries))
        kind = self.kind(queries, keys)
        if kind is Kind.PARTIAL:
            for some, others in self.cut(queries, keys):
                seen = meet(others, self.needs(some))
                if (part := self.kind(some, seen)) is not Kind.EMPTY:
                    yield some, seen, part
        elif kind is not Kind.EMPTY:
            yield queries, keys, kind


@dataclass(frozen=True)
class Band(Pattern):
    """Query t sees the keys s with low <= s - t < high."""

    @property
    @abstractmethod
    def low(self) -> int:
        """Query t sees no key before t + low."""

    @property
    @abstractmethod
    def high(self) -> int:
        """Query t sees no key from t + high on."""

    def span(self, query: int) -> range:
        return range(min(max(query + self.low, 0), self.kv_length), min(query + self.high, self.kv_length))

    def users(self, keys: range) -> range:
        if not keys:
            return range(0)
        start = max(keys[0] - self.high + 1, 0)
        return range(start, max(start, min(keys[-1] - self.low + 1, self.q_length)))

    def pairs(self, queries: range, keys: range) -> int:
        """A span and `keys` share clamp(stop) - clamp(start) rows, both clamped to `keys`; each is a sum over the
        queries that `ramp` has in closed form."""
        if not queries or not keys:
            return 0
        return ramp(queries, self.high, keys) - ramp(queries, self.low, keys)


@dataclass(frozen=True)
class Full(Band):
    """Every key, or when causal every key up to the query."""

    near = False

    @property
    def low(self) -> int:
        return 1 - self.q_length

    @property
    def high(self) -> int:
        return 1 if self.causal else self.kv_length

    @property
    def text(self) -> str:
        return "causal" if self.causal else "full"

    def cut(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        """Into a square triangle, the full part beside it and the full part below it: no tile needs a mask."""
        square = meet(queries, keys)
        yield queries, range(keys.start, square.start)
        yield square, square
        yield range(square.stop, queries.stop), square


@dataclass(frozen=True)
class Window(Band):
    """The `width` keys t-width+1 .. t when causal, else all keys nearer than `width`.

    Partial tiles are cut into strips of at least `strip` queries, each with the keys that it needs: a strip of s
    queries computes s + width - 1 keys a query (both ways s + 2 width - 2), so strips of width / 4 waste a fifth.
    Far shorter ones would leave the kernel idle.
    """

    near = True

    width: int = 1
    strip: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1 or self.strip < 1:
            raise PlanError(
                f"a window of {self.width} keys in strips of {self.strip} queries was asked for; "
                "both must be at least 1"
            )

    @property
    def low(self) -> int:
        return 1 - self.width

    @property
    def high(self) -> int:
        return 1 if self.causal else self.width

    @property
    def text(self) -> str:
        return f"window({self.width})" if self.causal else f"window({self.width},both)"

    def cut(self, queries: range, keys: range) -> Iterator[tuple[range, range]]:
        strip = max(self.strip, self.width // 4)
        for start in range(queries.start, queries.stop, strip):
            yield range(start, min(start + strip, queries.stop)), keys


def ramp(queries: range, offset: int, keys: range) -> int:
    """The sum over `queries` of t + offset, clamped to keys.start .. keys.stop."""
    rising = meet(queries, range(keys.start - offset, keys.stop - offset))
    below = len(meet(queries, range(queries.start, max(queries.start, keys.start - offset))))
    above = len(queries) - below - len(rising)
    on_ramp = len(rising) * (rising[0] + rising[-1] + 2 * offset) // 2 if rising else 0
    return below * keys.start + on_ramp + above * keys.stop
