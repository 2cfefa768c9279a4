"""The plan of one attention: who sends which rows to whom, what is computed meanwhile, what may be dropped.

    forward    hop h of a route is posted in step h-1 and used in step h; home blocks are in step 0, under the first hop
    backward   the same mirrored in time; gradients walk the routes home and meet the home blocks in the last step

What travels is keys and values (and their gradients back), or, where `queries_move`, queries: their results come home
as keys' gradients do, merged with what each stop adds, so that forward and backward are both mirrored plans. Queries
that every rank has whole ("merge") need not travel: what each rank makes of its own keys is merged in the end.

A plan is data. It computes nothing and sends nothing; executor, cost, report and proof read the same steps. It knows no
rank either: it is the same object on all ranks, and each rank unrolls its own steps from it.

A step is run as: post all its receives, then its sends; compute its blocks; wait for its messages; put what came; drop.
What comes in step i is therefore used from step i+1 on, and both ends of a message post it in the same step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from itertools import chain

from ringopt.context_parallel.geometry.layouts import Layout, Replicated
from ringopt.context_parallel.geometry.pattern import Kind, Pattern
from ringopt.context_parallel.geometry.rows import ByRank, Rows, count, join, meet, nth_part, rows_text, without
from ringopt.context_parallel.plan.route import Route, Strategy
from ringopt.errors import PlanError


class Cargo(Enum):
    """What a message carries for its rows."""

    __hash__ = object.__hash__  # there is one of each; that of Enum is written in Python, and asked for each message

    OUT = "out"  # keys and values (or queries), away from home
    BACK = "back"  # their gradients, summed on the way home (of queries: in the forward their results, merged)


@dataclass(frozen=True)
class Message:
    """One buffer from rank `source` to rank `target`: its pieces of global rows in ascending order."""

    source: int
    target: int
    cargo: Cargo
    rows: Rows

    def __str__(self) -> str:
        return f"{self.cargo.value} {rows_text(self.rows)} {self.source}->{self.target}"


@dataclass(frozen=True)
class Block:
    """A tile to compute: query rows of this rank x key rows that are here, both global."""

    queries: range
    keys: range
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value} {rows_text([self.queries])} x {rows_text([self.keys])}"


@dataclass(frozen=True)
class Step:
    """What a rank posts, computes meanwhile, and has no more use for when the step ends."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    blocks: tuple[Block, ...] = ()
    drops: Rows = ()  # pieces of remote rows, as they came

    @cached_property
    def sends_to(self) -> dict[int, list[Message]]:
        """The sends of each target, in order."""
        found: dict[int, list[Message]] = defaultdict(list)
        for message in self.sends:
            found[message.target].append(message)
        return found

    @cached_property
    def receives_from(self) -> dict[int, list[Message]]:
        """The receives of each source, in order."""
        found: dict[int, list[Message]] = defaultdict(list)
        for message in self.receives:
            found[message.source].append(message)
        return found

    def __str__(self) -> str:
        mail = [f"receive {m}" for m in self.receives] + [f"send {m}" for m in self.sends]
        drops = [f"drop {rows_text(self.drops)}"] if self.drops else []
        return "; ".join([*mail, *map(str, self.blocks), *drops]) or "idle"


@dataclass(frozen=True)
class Exchange:
    """The plan of `pattern` with queries and keys laid out over the same ranks.

    Hashable, and cheap to make: steps are unrolled per rank when asked for, and kept. Raises PlanError where lengths or
    numbers of ranks do not fit.

    part   (i, n): every piece of keys is cut in n, and only the i-th of each is attended to
    """

    pattern: Pattern
    q_layout: Layout
    kv_layout: Layout
    strategy: Strategy
    queries_move: bool = False
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        lengths = (self.q_layout.length, self.kv_layout.length)
        if lengths != (self.pattern.q_length, self.pattern.kv_length) or self.q_layout.ranks != self.kv_layout.ranks:
            raise PlanError(
                f"attention of {self.pattern.q_length} queries over {self.pattern.kv_length} keys was given layouts of "
                f"{lengths[0]} rows over {self.q_layout.ranks} ranks and {lengths[1]} rows over {self.kv_layout.ranks} "
                "ranks; lengths must agree and the ranks be the same"
            )
        if self.merges and not (self.queries_move and self.strategy.moves_nothing):
            raise PlanError("queries that every rank has whole are merged, and take no other strategy")

    @property
    def ranks(self) -> int:
        return self.q_layout.ranks

    # What follows from pattern and layouts

    def q_pieces(self, rank: int) -> Rows:
        """The query rows of `rank` that take part, in the order of its local tensor."""
        return self._q_pieces[rank]

    def kv_pieces(self, rank: int) -> Rows:
        """The key rows of `rank` that take part, in the order of its local tensor."""
        return self._kv_pieces[rank]

    def home(self, rank: int) -> Rows:
        """Of the side that travels, the rows of `rank`."""
        return self._q_pieces[rank] if self.queries_move else self._kv_pieces[rank]

    def moved(self, block: Block) -> range:
        """The rows of `block` that travel; the others are the rank's own."""
        return block.queries if self.queries_move else block.keys

    def needs(self, rank: int) -> Rows:
        """The rows of the travelling side that those of `rank` meet, its own included: keys that its queries see, or
        queries that see its keys."""
        return self._needs[rank]

    @property
    def merges(self) -> bool:
        """Whether the results of the same queries, on all ranks, are parts that remain to be merged."""
        return self.q_layout.name == Replicated.name

    def missing(self, rank: int) -> Rows:
        """Of these, the ones that other ranks hold."""
        own = self.home(rank)
        return tuple(piece for rows in self.needs(rank) for piece in without(rows, own))

    def blocks(self, rank: int, rows: range) -> tuple[Block, ...]:
        """The tiles of what stays on `rank` with `rows` of what travels."""
        if (rank, rows) not in self._blocks:
            tiles = self.pattern.tiles
            if self.queries_move:
                found = (tile for own in self.kv_pieces(rank) for tile in tiles(rows, own))
            else:
                found = (tile for own in self.q_pieces(rank) for tile in tiles(own, rows))
            self._blocks[rank, rows] = tuple(Block(*tile) for tile in found)
        return self._blocks[rank, rows]

    def home_blocks(self, rank: int) -> tuple[Block, ...]:
        """The tiles of the queries of `rank` with its own keys."""
        return tuple(block for rows in self.home(rank) for block in self.blocks(rank, rows))

    @cached_property
    def shard(self) -> int:
        """Rows that travel of the rank that has most."""
        return max(count(self.home(rank)) for rank in range(self.ranks))

    @cached_property
    def leaving(self) -> int:
        """Of these, the ones that other ranks need; of the rank that has most of them."""
        everyone = range(self.ranks)
        gone = join(chain.from_iterable(map(self.missing, everyone)))
        return max(count(meet(own, rows) for own in self.home(rank) for rows in gone) for rank in everyone)

    @cached_property
    def _blocks(self) -> dict[tuple[int, range], tuple[Block, ...]]:
        return {}  # forward and backward have the same

    @cached_property
    def _routes(self) -> dict[int, tuple[Route, ...]]:
        return {}  # the same

    @cached_property
    def _q_pieces(self) -> ByRank:
        return ByRank(lambda rank: _pieces(self.pattern, self.q_layout, rank))

    @cached_property
    def _kv_pieces(self) -> ByRank:
        def of(rank: int) -> Rows:
            parts = (nth_part(piece, *self.part) for piece in _pieces(self.pattern, self.kv_layout, rank))
            return tuple(filter(len, parts))

        return ByRank(of)

    def parts(self, number: int) -> tuple[Exchange, ...]:
        """As so many exchanges, which together are this one: each of some of the keys of every rank."""
        return _parts(self, number)

    @cached_property
    def _needs(self) -> ByRank:
        met, own = (self.pattern.used, self._kv_pieces) if self.queries_move else (self.pattern.needed, self._q_pieces)
        return ByRank(lambda rank: join(chain.from_iterable(map(met, own[rank]))))

    # What follows from the strategy

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Of the whole world."""
        return tuple(route for home in range(self.ranks) for route in self._routes_from(home))

    def routes_at(self, rank: int) -> tuple[Route, ...]:
        """Routes enough to write the steps of `rank`: where routes are direct, its own, so that the world's p(p-1) are
        never listed."""
        if not self.strategy.direct:
            return self.routes
        if rank not in self._routes:
            self._routes[rank] = self._direct_routes(rank)
        return self._routes[rank]

    def _direct_routes(self, rank: int) -> tuple[Route, ...]:
        layout = self.q_layout if self.queries_move else self.kv_layout
        owners = set().union(*map(layout.owners, self.needs(rank))) - {rank}
        coming = (route for owner in sorted(owners) for route in self._routes_from(owner, rank))
        return (*self._routes_from(rank), *coming)

    def _routes_from(self, home: int, only: int | None = None) -> Iterator[Route]:
        """The routes of the pieces of `home`, to all users or `only` to one."""
        for piece in self.home(home):
            if only is not None:
                users = [only]
            elif self.queries_move:
                owners = map(self.kv_layout.owners, self.pattern.needed(piece))
                users = sorted(set().union(*owners) - {home})
            else:
                owners = map(self.q_layout.owners, self.pattern.used(piece))
                users = sorted(set().union(*owners) - {home})
            needed = {user: tuple(filter(len, (meet(piece, rows) for rows in self.needs(user)))) for user in users}
            yield from self.strategy.routes(home, needed, self.ranks)

    @cached_property
    def length(self) -> int:
        """Hops of the longest route."""
        return 1 if self.strategy.direct else max((route.hops for route in self.routes), default=0)

    def forward(self, rank: int) -> tuple[Step, ...]:
        """The steps of `rank`; none where it neither computes nor passes anything on."""
        return _there_and_back(self, rank) if self.queries_move else _there(self, rank)

    def backward(self, rank: int) -> tuple[Step, ...]:
        """The steps of `rank`. Keys travel again, in the order that lets gradients end at home: dK and dV then make as
        many hops as keys made, where a ring that begins with the nearest rows carries them once more round.

        The home blocks are in the last step, under the last gradients on their way home; they wait for nothing, so that
        the executor may compute some of them under the first rows on their way out.
        """
        return _there_and_back(self, rank)

    def steps(self, rank: int, backward: bool) -> tuple[Step, ...]:
        """`backward(rank)` or `forward(rank)`."""
        return self.backward(rank) if backward else self.forward(rank)

    @property
    def volume(self) -> int:
        """Rows sent by all ranks together in the forward, on the way there; as many rows of gradients (or results) come
        back, and the way there is never longer than that."""
        return sum(len(route.rows) * route.hops for route in self.routes)

    def sent_rows(self, rank: int, cargo: Cargo, backward: bool = False) -> int:
        """Rows that `rank` sends as `cargo` in the forward, or in the backward."""
        return sum(count(m.rows) for step in self.steps(rank, backward) for m in step.sends if m.cargo is cargo)


def _pieces(pattern: Pattern, layout: Layout, rank: int) -> Rows:
    return tuple(piece for rows in layout.ranges(rank) for piece in pattern.keep(rows))


@lru_cache(maxsize=1024)
def _parts(exchange: Exchange, number: int) -> tuple[Exchange, ...]:
    return tuple(replace(exchange, part=(part, number)) for part in range(number)) if number > 1 else (exchange,)


@lru_cache(maxsize=1024)
def _there(exchange: Exchange, rank: int) -> tuple[Step, ...]:
    draft, ranks = Draft(rank), exchange.ranks
    draft.compute(0, exchange.home_blocks(rank))
    for route in exchange.routes_at(rank):
        hop = route.hop_of(rank, ranks)
        if hop is None:
            continue
        if hop > 0:
            draft.receive(hop - 1, route.stop(hop - 1, ranks), Cargo.OUT, route.rows)
            draft.compute(hop, exchange.blocks(rank, route.rows))
            draft.drop(hop, route.rows)
        if hop < route.hops:
            draft.send(hop, route.stop(hop + 1, ranks), Cargo.OUT, route.rows)
    return draft.steps()


@lru_cache(maxsize=1024)
def _there_and_back(exchange: Exchange, rank: int) -> tuple[Step, ...]:
    """Hop h computes in step last - h. The far stop has its rows straight from home, each other stop from the one
    beyond it; gradients go the same way on to home, but rows need come no nearer home than their first user."""
    draft, ranks, last = Draft(rank), exchange.ranks, exchange.length + 1
    draft.compute(last, exchange.home_blocks(rank))
    for route in exchange.routes_at(rank):
        hop = route.hop_of(rank, ranks)
        if hop is None:
            continue
        now, inward, outward = last - hop, route.stop(hop - 1, ranks), route.stop(hop + 1, ranks)
        if hop == 0:
            draft.send(last - route.hops - 1, route.stop(route.hops, ranks), Cargo.OUT, route.rows)
        else:
            draft.send(now + 1, inward, Cargo.BACK, route.rows)
        if hop < route.hops:
            draft.receive(now, outward, Cargo.BACK, route.rows)
        if hop > route.first:
            draft.send(now, inward, Cargo.OUT, route.rows)
        if hop >= route.first:
            draft.receive(now - 1, route.home if hop == route.hops else outward, Cargo.OUT, route.rows)
            draft.compute(now, exchange.blocks(rank, route.rows))
            draft.drop(now, route.rows)
    return draft.steps()


class Draft:
    """The steps of one rank while they are written. All rows of one cargo for one peer in one step are one message, and
    order within a step is sorted, so that both ends of a channel name its messages in the same order."""

    def __init__(self, rank: int):
        self.rank = rank
        self._mail: dict[tuple[int, int, int, Cargo], list[range]] = defaultdict(list)  # by step, source, target, cargo
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        self._drops: dict[int, list[range]] = defaultdict(list)

    def send(self, step: int, target: int, cargo: Cargo, rows: range) -> None:
        self._mail[step, self.rank, target, cargo].append(rows)

    def receive(self, step: int, source: int, cargo: Cargo, rows: range) -> None:
        self._mail[step, source, self.rank, cargo].append(rows)

    def compute(self, step: int, blocks: tuple[Block, ...]) -> None:
        if blocks:
            self._blocks[step].extend(blocks)

    def drop(self, step: int, rows: range) -> None:
        self._drops[step].append(rows)

    def steps(self) -> tuple[Step, ...]:
        sends: dict[int, list[Message]] = defaultdict(list)
        receives: dict[int, list[Message]] = defaultdict(list)
        for (step, source, target, cargo), rows in sorted(self._mail.items(), key=_order):
            ascending = tuple(sorted(rows, key=lambda piece: piece.start))
            side = sends if source == self.rank else receives
            side[step].append(Message(source, target, cargo, ascending))
        end = 1 + max((*sends, *receives, *self._blocks, *self._drops), default=-1)
        return tuple(
            Step(tuple(sends[i]), tuple(receives[i]), tuple(self._blocks[i]), tuple(self._drops[i])) for i in range(end)
        )


def _order(entry: tuple[tuple[int, int, int, Cargo], list[range]]) -> tuple[int, int, int, str]:
    step, source, target, cargo = entry[0]
    return step, source, target, cargo.value
