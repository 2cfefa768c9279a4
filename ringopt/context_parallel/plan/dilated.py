"""The plan of dilated attention on shards: what a rank computes alone, and what is exchanged.

A segment that lies in one piece of one rank costs no message: such segments are computed many at a time. The others,
which lie across an edge of the shards, are what remains: their kept rows, one after another, are a shorter sequence cut
into segments, that is planned, proved and run like any other (exchange.py, geometry/local_segments.py). There are fewer
of them than there are edges of shards, so a plan does not grow with the sequence.

    segments of 8, rate 2   |x.x.x.x.|x.x.x.x.|x.x.x.x.|
    ranks                   000000000001111111111111222      the first is whole on rank 0; the second and the third
                                                             are exchanged, as rows 0:4 and 4:8
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

from ringopt.context_parallel.geometry.dilation import DilatedTerm, Dilation, dilation_of
from ringopt.context_parallel.geometry.layouts import Layout, layout_of
from ringopt.context_parallel.geometry.local_segments import Pieces, Segments
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.exchange import Cargo, Exchange
from ringopt.context_parallel.plan.prove import prove
from ringopt.context_parallel.plan.strategies import strategy_of
from ringopt.errors import OptionError, PlanError

STRATEGIES = ("auto", "gather", "ring")


@dataclass(frozen=True)
class Stretch:
    """`segments` neighbouring segments of `length` rows each, whole on one rank, from the global row `first` on, which
    is the rank's own row `here`."""

    first: int
    here: int
    segments: int
    length: int

    @property
    def rows(self) -> int:
        return self.segments * self.length


@dataclass(frozen=True)
class Piece:
    """Kept rows of a rank that lie in one segment: `here` in its own tensor, with `packed` as their numbers among all
    rows that are exchanged."""

    here: slice
    packed: range


@dataclass(frozen=True)
class TermPlan:
    """One term over the shards of `layout`."""

    term: DilatedTerm
    layout: Layout
    causal: bool
    asked: str

    def whole(self, rank: int) -> Iterator[Stretch]:
        """The segments that lie in one piece of the rank."""
        kept, here = self.term.kept, 0
        for rows in self.layout.ranges(rank):
            first, last = -(-rows.start // kept.segment), rows.stop // kept.segment
            if last > first:
                start = first * kept.segment
                yield Stretch(start, here + start - rows.start, last - first, kept.segment)
            tail = max(first, last) * kept.segment
            if rows.stop == kept.length and rows.start <= tail < rows.stop and kept.rows(tail // kept.segment):
                yield Stretch(tail, here + tail - rows.start, 1, rows.stop - tail)
            here += len(rows)

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """The segments that lie across an edge of the shards and keep rows."""
        kept = self.term.kept
        edges = {rows.stop for rank in range(self.layout.ranks) for rows in self.layout.ranges(rank)} - {kept.length}
        numbers = sorted({edge // kept.segment for edge in edges if edge % kept.segment})
        return tuple(number for number in numbers if kept.rows(number))

    @cached_property
    def exchange(self) -> Exchange | None:
        """Of the segments that are cut; None where there are none. The same object on all ranks."""
        if not self.cut:
            return None
        edges = (0, *accumulate(len(self.term.kept.rows(number)) for number in self.cut))
        pattern = Segments(edges[-1], edges[-1], self.causal, edges)
        held = sorted((piece.packed.start, rank) for rank in range(self.layout.ranks) for piece in self.pieces(rank))
        layout = Pieces(
            edges[-1], self.layout.ranks, (*(start for start, _ in held), edges[-1]), tuple(r for _, r in held)
        )
        gather = Exchange(pattern, layout, layout, strategy_of("gather"))
        return gather if self._gathers(gather) else Exchange(pattern, layout, layout, strategy_of("ring"))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The kept rows of the rank in segments that are cut, in the order of `packed`."""
        kept, found, before = self.term.kept, [], 0
        ranges = self.layout.ranges(rank)
        places = dict(zip(ranges, accumulate(map(len, ranges), initial=0), strict=False))
        for number in self.cut:
            rows = kept.rows(number)
            for own, here in places.items():
                some = kept.within(number, own)
                if some:
                    first = rows[some.start] - own.start + here
                    place = slice(first, first + (len(some) - 1) * kept.rate + 1, kept.rate)
                    found.append(Piece(place, range(before + some.start, before + some.stop)))
            before += len(rows)
        return tuple(found)

    def rows(self, packed: range) -> range:
        """The rows of the sequence that have these numbers among all that are exchanged; they are of one segment."""
        assert self.exchange is not None and isinstance(self.exchange.pattern, Segments)
        edges = self.exchange.pattern.edges
        number = bisect_right(edges, packed.start) - 1
        first = edges[number]
        return self.term.kept.rows(self.cut[number])[packed.start - first : packed.stop - first]

    def _gathers(self, gather: Exchange) -> bool:
        """Unless a rank would hold more rows of others than it has rows of its own."""
        if self.asked != "auto":
            return self.asked == "gather"
        ranks = range(gather.ranks)
        own = max(count(self.layout.ranges(rank)) for rank in ranks)
        return all(count(gather.needs(rank)) - count(gather.kv_pieces(rank)) <= own for rank in ranks)

    def pairs(self, rank: int) -> int:
        """Pairs of query and key that the rank computes, for one head."""
        whole = 0
        for stretch in self.whole(rank):
            size = len(range(self.term.kept.offset, stretch.length, self.term.kept.rate))
            whole += stretch.segments * (size * (size + 1) // 2 if self.causal else size * size)
        if self.exchange is None:
            return whole
        pattern, everything = self.exchange.pattern, range(self.exchange.pattern.kv_length)
        return whole + sum(pattern.pairs(own, everything) for own in self.exchange.q_pieces(rank))


@dataclass(frozen=True)
class DilatedPlan:
    """All terms of one attention of `heads` query heads over `kv_heads` KV heads.

    Raises OptionError for a strategy that is none of STRATEGIES.
    """

    dilation: Dilation
    heads: int
    kv_heads: int
    layout: Layout
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise OptionError(
                f"strategy={self.strategy!r}: dilated attention travels by one of {', '.join(map(repr, STRATEGIES))}"
            )

    @cached_property
    def terms(self) -> tuple[TermPlan, ...]:
        found = self.dilation.terms(self.layout.length, self.heads, self.kv_heads)
        return tuple(TermPlan(term, self.layout, self.dilation.causal, self.strategy) for term in found)

    @cached_property
    def strategies(self) -> str:
        """How rows travel, for the report: "local" where none does."""
        used = {part.exchange.strategy for part in self.terms if part.exchange is not None and part.exchange.routes}
        names = [name for name in ("gather", "ring") if strategy_of(name) in used]
        return " + ".join(names) or "local"

    def sent_rows(self, rank: int, cargo: Cargo, backward: bool = False) -> int:
        """Rows of one KV head that the rank sends, summed over the KV heads of every term."""
        return sum(
            len(part.term.kv_heads) * part.exchange.sent_rows(rank, cargo, backward)
            for part in self.terms
            if part.exchange is not None
        )

    def pairs(self, rank: int) -> int:
        """Pairs of query and key that the rank computes, of all heads; a pair of two patterns is two."""
        return sum(len(part.term.heads) * part.pairs(rank) for part in self.terms)


@lru_cache(maxsize=256)
def dilated_plan_of(
    pattern: str, length: int, heads: tuple[int, int], ranks: int, layout: str, strategy: str
) -> DilatedPlan:
    """The plan of what is named, for `heads` = (query heads, KV heads): see `dilation_of` and `layout_of` for the names
    and the errors."""
    q_heads, kv_heads = heads
    return DilatedPlan(dilation_of(pattern), q_heads, kv_heads, layout_of(layout, length, ranks), strategy)


@lru_cache(maxsize=256)
def prove_dilated(plan: DilatedPlan, rank: int) -> None:
    """Proves what is exchanged as any exchange is, and that each kept row of the rank is exchanged or in a whole
    segment, and no row both. Raises PlanError. Cached.

    Pairs within whole segments need no proof: each segment is one tile, all of it.
    """
    for part in plan.terms:
        if part.exchange is not None:
            prove(part.exchange, rank)
        kept, stretches = part.term.kept, tuple(part.whole(rank))
        numbers = [
            range(some.first // kept.segment, -(-(some.first + some.rows) // kept.segment)) for some in stretches
        ]
        both = [number for number in part.cut if any(number in some for some in numbers)]
        edges = [(some.first % kept.segment, (some.first + some.rows) % kept.segment) for some in stretches]
        ragged = [stretch for stretch, (start, stop) in zip(stretches, edges, strict=True) if start or stop]
        found = sum(some.segments * len(range(kept.offset, some.length, kept.rate)) for some in stretches)
        found += count(piece.packed for piece in part.pieces(rank))
        wanted = sum(kept.before(rows.stop) - kept.before(rows.start) for rows in plan.layout.ranges(rank))
        last = all(some.first + some.rows == kept.length for some in ragged)
        if both or not last or found != wanted:
            raise PlanError(
                f"rank {rank}, {kept}: computes {found} rows of {wanted}, and segments {both} twice. This is a "
                "fault of ringopt's planner: please report it"
            )
