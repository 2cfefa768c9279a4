"""The plan of "ulysses": rows are traded for heads, so that each rank computes whole attentions of a few heads.

    out     every rank sends every other rank the heads that this one computes, of its own rows of Q, K and V
    compute the rank's share of the heads over the whole sequence, as one device would
    back    the results of every row go to the rank that holds it; the backward is the same trade with more in it

The all-to-all of DeepSpeed-Ulysses (Jacobs et al. 2023), without its conditions: query heads are shared as evenly as
they go, so p need not divide them; a rank gets the KV heads that its query heads read, so that of grouped heads
(fewer KV heads than ranks, too) none is sent to a rank that has no use for it; rows are split as the layouts say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from ringopt.attention.check import prove
from ringopt.attention.exchange import Exchange
from ringopt.attention.layouts import Contiguous, Layout, layout_of
from ringopt.attention.patterns import Pattern, pattern_of
from ringopt.attention.routes import Local
from ringopt.attention.rows import Rows, count, join
from ringopt.errors import OptionError, PlanError


@dataclass(frozen=True)
class Part:
    """Query heads and the KV heads that they read, evenly grouped: what a kernel takes at once."""

    queries: range
    keys: range


@dataclass(frozen=True)
class Parcel:
    """What goes from `home` to `worker`, and of which results come back: rows of `home` x heads of `worker`."""

    home: int
    worker: int
    q_rows: Rows
    kv_rows: Rows
    q_heads: range
    kv_heads: range


@dataclass(frozen=True)
class HeadExchange:
    """Who computes which heads. Immutable and hashable, the same object on all ranks; raises PlanError where lengths or
    numbers of ranks do not fit."""

    pattern: Pattern
    q_layout: Layout
    kv_layout: Layout
    q_heads: int
    kv_heads: int

    def __post_init__(self) -> None:
        Exchange(self.pattern, self.q_layout, self.kv_layout, Local())  # for its checks
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise PlanError(f"{self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")

    @property
    def ranks(self) -> int:
        return self.q_layout.ranks

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q_heads // self.kv_heads

    def share(self, rank: int) -> range:
        """The query heads that `rank` computes."""
        return range(self.q_heads * rank // self.ranks, self.q_heads * (rank + 1) // self.ranks)

    def kv_share(self, rank: int) -> range:
        """The KV heads that these read."""
        share = self.share(rank)
        return range(share[0] // self.group, share[-1] // self.group + 1) if share else range(0)

    def parts(self, rank: int) -> tuple[Part, ...]:
        """The share of `rank`, cut where it begins or ends within a group: three parts at most."""
        share, group = self.share(rank), self.group
        first, last = -(-share.start // group) * group, share.stop // group * group  # of the whole groups
        cuts = sorted({share.start, min(max(first, share.start), share.stop), max(last, share.start), share.stop})
        heads = (range(start, stop) for start, stop in pairwise(cuts))
        return tuple(Part(part, range(part[0] // group, part[-1] // group + 1)) for part in heads)

    def parcel(self, home: int, worker: int) -> Parcel:
        rows = (self.q_layout.ranges(home), self.kv_layout.ranges(home))
        return Parcel(home, worker, *rows, self.share(worker), self.kv_share(worker))

    @cached_property
    def whole(self) -> Exchange:
        """What a rank computes with its heads: the attention of one device, rows in sequence order."""
        pattern = self.pattern
        return Exchange(pattern, Contiguous(pattern.q_length, 1), Contiguous(pattern.kv_length, 1), Local())


@lru_cache(maxsize=1024)
def head_exchange_of(
    pattern: str, q_length: int, kv_length: int, ranks: int, q_layout: str, kv_layout: str, heads: tuple[int, int]
) -> HeadExchange:
    """For `heads` = (query heads, KV heads). Raises OptionError where ranks outnumber the query heads, and as
    `pattern_of` and `layout_of` do."""
    if heads[0] < ranks:
        raise OptionError(
            f"strategy 'ulysses' gives every rank whole heads, and {heads[0]} query heads are too few for {ranks} "
            "ranks. Take another strategy, or 'auto'"
        )
    layouts = layout_of(q_layout, q_length, ranks), layout_of(kv_layout, kv_length, ranks)
    return HeadExchange(pattern_of(pattern, q_length, kv_length), *layouts, *heads)


@lru_cache(maxsize=1024)
def prove_heads(plan: HeadExchange) -> None:
    """Every (head, query, key) that is seen is computed once and no other, and what is computed finds its rows and its
    way home. Nothing of how the plan was made is believed. Raises PlanError. Cached."""
    everyone = range(plan.ranks)
    _expect_once([plan.share(rank) for rank in everyone], plan.q_heads, "query heads")
    for layout, what in ((plan.q_layout, "rows of queries"), (plan.kv_layout, "rows of keys")):
        _expect_once([piece for rank in everyone for piece in layout.ranges(rank)], layout.length, what)
    for rank in everyone:
        share, kv_share, parts = plan.share(rank), plan.kv_share(rank), plan.parts(rank)
        _expect([head for part in parts for head in part.queries] == list(share), rank, "does not compute its share")
        for part in parts:
            each = len(part.queries) // len(part.keys)
            read = [part.keys[i // each] for i in range(len(part.queries))] if each * len(part.keys) else []
            right = read == [head // plan.group for head in part.queries] and set(read) <= set(kv_share)
            _expect(right, rank, f"would compute query heads {part.queries} with KV heads {part.keys}")
        for home in everyone:
            parcel = plan.parcel(home, rank)
            sent = (parcel.q_rows, parcel.kv_rows, parcel.q_heads, parcel.kv_heads)
            wanted = (plan.q_layout.ranges(home), plan.kv_layout.ranges(home), share, kv_share)
            _expect(sent == wanted, rank, f"is not sent what it computes with by rank {home}")
    prove(plan.whole, 0)


def _expect_once(pieces: Sequence[range], length: int, what: str) -> None:
    if join(pieces) != (range(length),) or count(pieces) != length:
        raise PlanError(f"ulysses: not each of {length} {what} is in one share: {pieces}. {ADVICE}")


def _expect(truth: bool, rank: int, fault: str) -> None:
    if not truth:
        raise PlanError(f"ulysses: rank {rank} {fault}. {ADVICE}")


ADVICE = "This is a fault of ringopt's planner: please report it"
