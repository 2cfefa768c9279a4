"""The plans of "ulysses" and "hybrid": rows are traded for heads, so that a rank computes few heads over many rows.

    out     every rank sends every other rank of its node the heads that this one computes, of its own rows of Q, K, V
    compute the rank's share of the heads over the rows of its node: K and V travel between nodes, round the ring of the
            ranks that have the same place in theirs
    back    the results of every row go to the rank that holds it; the backward is the same with more in it

A node is `node` ranks in a row. Where it is all of them, nothing travels between nodes, and this is the all-to-all of
DeepSpeed-Ulysses (Jacobs et al. 2023); with several nodes it is the hybrid of USP (Fang and Zhao 2024, section 3) and
LoongTrain (Gu et al. 2024, 2D-Attention), in which only the ring crosses the slower link. Both without their
conditions: query heads are shared as evenly as they go, so the ranks of a node need not divide them; a rank gets the KV
heads that its query heads read, so that of grouped heads (fewer KV heads than ranks, too) none is sent to a rank that
has no use for it; rows are split as the layouts say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.context_parallel.geometry.pattern import Pattern
from ringopt.context_parallel.geometry.rows import Rows, count, join
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.prove import prove
from ringopt.context_parallel.plan.strategies import NoExchange, Ring
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
    """Who computes which heads; `node` ranks in a row trade with each other. Immutable and hashable, the same object on
    all ranks; raises PlanError where lengths or numbers of ranks do not fit."""

    pattern: Pattern
    q_layout: Layout
    kv_layout: Layout
    q_heads: int
    kv_heads: int
    node: int

    def __post_init__(self) -> None:
        Exchange(self.pattern, self.q_layout, self.kv_layout, NoExchange())  # for its checks
        if self.kv_heads < 1 or self.q_heads % self.kv_heads:
            raise PlanError(f"{self.q_heads} query heads cannot share {self.kv_heads} KV heads evenly")
        if self.node < 1 or self.ranks % self.node:
            raise PlanError(f"{self.ranks} ranks are no nodes of {self.node}")

    @property
    def ranks(self) -> int:
        return self.q_layout.ranks

    @property
    def nodes(self) -> int:
        return self.ranks // self.node

    def peers(self, rank: int) -> range:
        """The ranks of its node, itself among them: those it trades with."""
        first = rank // self.node * self.node
        return range(first, first + self.node)

    def circle(self, rank: int) -> range:
        """The ranks of its place in all nodes: those that have the same heads."""
        return range(rank % self.node, self.ranks, self.node)

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.q_heads // self.kv_heads

    def share(self, rank: int) -> range:
        """The query heads that `rank` computes."""
        place = rank % self.node
        return range(self.q_heads * place // self.node, self.q_heads * (place + 1) // self.node)

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
        q_rows, kv_rows = self.q_layout.ranges(home), self.kv_layout.ranges(home)
        return Parcel(home, worker, q_rows, kv_rows, self.share(worker), self.kv_share(worker))

    @cached_property
    def whole(self) -> Exchange:
        """What the ranks of one circle do with their heads: the attention of as many ranks as there are nodes, each of
        which holds the rows of its node. In the same layout: chunks of one node touch, or mirror each other."""
        q_layout, kv_layout = (replace(side, ranks=self.nodes) for side in (self.q_layout, self.kv_layout))
        return Exchange(self.pattern, q_layout, kv_layout, Ring())


@lru_cache(maxsize=1024)
def head_exchange_of(sharded: ShardedPattern, heads: tuple[int, int], node: int | None = None) -> HeadExchange:
    """For `heads` = (query heads, KV heads) and nodes of `node` ranks, None: all are one. Raises OptionError where the
    ranks of a node outnumber the query heads or are no part of all, and as `sharded.parsed` does."""
    ranks, (q_heads, kv_heads) = sharded.ranks, heads
    if node is not None and (node < 2 or node >= ranks or ranks % node):
        raise OptionError(
            f"strategy 'hybrid' trades rows for heads within nodes and sends keys between them, and {ranks} ranks are "
            f"not several nodes of {node} ranks, 2 or more each. Take 'ring' between single ranks, 'ulysses' within "
            "one node, or 'auto'"
        )
    who, trading = ("ulysses", f"{ranks} ranks") if node is None else ("hybrid", f"the {node} ranks of a node")
    if q_heads < (node or ranks):
        raise OptionError(
            f"strategy {who!r} gives every rank whole heads, and {q_heads} query heads are too few for {trading}. "
            "Take another strategy, or 'auto'"
        )
    pattern, q_layout, kv_layout = sharded.parsed()
    return HeadExchange(pattern, q_layout, kv_layout, q_heads, kv_heads, node or ranks)


@lru_cache(maxsize=4096)
def prove_heads(plan: HeadExchange, rank: int) -> None:
    """Every (head, query, key) that is seen is computed once and no other, and what is computed finds its rows and its
    way home. Nothing of how the plan was made is believed. Raises PlanError. Cached.

    Every rank proving its own plan proves the plan: each node has all heads of its own rows, each circle computes all
    pairs of its heads.
    """
    peers, circle = plan.peers(rank), plan.circle(rank)
    _expect(rank in peers and rank in circle, rank, f"is not among its own: {peers} and {circle}")
    _expect(len(circle) == plan.nodes and circle[rank // plan.node] == rank, rank, "has no place among the nodes")
    _expect_once(map(plan.share, peers), plan.q_heads, "query heads")
    for layout, side, what in (
        (plan.q_layout, plan.whole.q_layout, "rows of queries"),
        (plan.kv_layout, plan.whole.kv_layout, "rows of keys"),
    ):
        _expect_once((piece for each in range(plan.ranks) for piece in layout.ranges(each)), layout.length, what)
        joined = join(piece for each in peers for piece in layout.ranges(each))
        _expect(joined == side.ranges(rank // plan.node), rank, f"would not hold the {what} of its node")
    share, kv_share, parts = plan.share(rank), plan.kv_share(rank), plan.parts(rank)
    for other in circle:
        same = plan.circle(other) == circle and plan.parts(other) == parts
        _expect(same, rank, f"has another circle or other heads than rank {other} of it")
    _expect([head for part in parts for head in part.queries] == list(share), rank, "does not compute its share")
    for part in parts:
        each = len(part.queries) // len(part.keys)
        read = [part.keys[i // each] for i in range(len(part.queries))] if each * len(part.keys) else []
        right = read == [head // plan.group for head in part.queries] and set(read) <= set(kv_share)
        _expect(right, rank, f"would compute query heads {part.queries} with KV heads {part.keys}")
    for home in peers:
        parcel = plan.parcel(home, rank)
        sent = (parcel.q_rows, parcel.kv_rows, parcel.q_heads, parcel.kv_heads)
        wanted = (plan.q_layout.ranges(home), plan.kv_layout.ranges(home), share, kv_share)
        _expect(sent == wanted, rank, f"is not sent what it computes with by rank {home}")
    prove(plan.whole, rank // plan.node)


def _expect_once(pieces: Iterable[range], length: int, what: str) -> None:
    found: Sequence[range] = list(pieces)
    if join(found) != (range(length),) or count(found) != length:
        raise PlanError(f"trade of rows for heads: not each of {length} {what} is in one share: {found}. {ADVICE}")


def _expect(truth: bool, rank: int, fault: str) -> None:
    if not truth:
        raise PlanError(f"trade of rows for heads: rank {rank} {fault}. {ADVICE}")


ADVICE = "This is a fault of ringopt's planner: please report it"
