"""The strategies by name: which way keys and values travel. What a route is, and what follows: route.py."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

from ringopt.context_parallel.geometry.layouts import Replicated
from ringopt.context_parallel.geometry.rows import count, rows_text
from ringopt.context_parallel.plan.route import Needed, Route, RouteRequest, Strategy
from ringopt.errors import OptionError


@dataclass(frozen=True)
class NoExchange(Strategy):
    """Nothing travels: every rank has the rows that its queries see. Refuses where one has not."""

    direct = True
    moves_nothing = True

    def routes(self, home: int, needed: Needed, ranks: int) -> Iterator[Route]:
        return iter(())

    def most_rows(self, shard: int, backward: bool) -> int | None:
        return 0

    def refusal(self, asked: RouteRequest) -> str:
        if asked.queries_move and not asked.merges:
            return "it merges the results of queries that every rank has whole, and these are spread over the ranks"
        away = asked.q_layout if asked.queries_move else asked.kv_layout
        for rank in range(asked.ranks if away.name != Replicated.name else 0):
            if missing := asked.missing(rank):
                more = " ..." if len(missing) > 4 else ""
                return (
                    f"it moves no rows, and rank {rank} needs {count(missing)} of other ranks: rows "
                    f"{rows_text(missing[:4])}{more}"
                )
        return ""


@dataclass(frozen=True)
class Gather(Strategy):
    """Straight from home to every user, all in one step, and only the rows that this user needs.

    With a window over contiguous shards it moves the same rows as `Halo`, in one step instead of one a hop.
    """

    direct = True

    def routes(self, home: int, needed: Needed, ranks: int) -> Iterator[Route]:
        for user, pieces in needed.items():
            for rows in pieces:
                yield Route(rows, home, user - home, 1)

    def most_rows(self, shard: int, backward: bool) -> int | None:
        return None


class Neighbours(Strategy):
    """From neighbour to neighbour, each row as far as the last rank that needs it."""

    direct = False

    def routes(self, home: int, needed: Needed, ranks: int) -> Iterator[Route]:
        by_way = groupby(stretches(home, needed, ranks), lambda stretch: self.ways(home, stretch[1], ranks))
        for ways, neighbours in by_way:
            pieces = [rows for rows, _ in neighbours]
            for way in ways:
                yield Route(range(pieces[0].start, pieces[-1].stop), home, *way)

    def ways(self, home: int, distances: tuple[int, ...], ranks: int) -> tuple[tuple[int, int, int], ...]:
        """(stride, hops, first) of each way from `home` to users at these distances, ascending, forward round the ring:
        those before `turn` are reached forward, the others backward."""
        turn = self.turn(home, distances, ranks)
        forth, back = distances[:turn], distances[turn:]
        ahead = ((1, forth[-1], forth[0]),) if forth else ()
        behind = ((-1, ranks - back[0], ranks - back[-1]),) if back else ()
        return ahead + behind

    @abstractmethod
    def turn(self, home: int, distances: tuple[int, ...], ranks: int) -> int:
        """How many of the distances are walked forward."""


@dataclass(frozen=True)
class Ring(Neighbours):
    """From neighbour to neighbour, each row as far as the last rank that needs it (Liu et al., Ring Attention, 2023).

    One-way is what "ring" means. A rank buffers at most two shards whatever p is: the one that it computes with and
    sends on, and the one that comes in; in the first step its own going out takes the place of the former. So memory
    falls as 1/p from p = 2 on. Rows that no other rank sees stay at home. Backward the bound is three shards, of keys
    and of gradients: a rank's own may leave while others pass.

    Two-way sends both ways round and never across the widest gap between a row's users. Under a causal zigzag heads go
    forward and tails back, which is 3/4 of the one-way traffic. But both directions are buffered at once (2.5 shards
    forward from p = 8 on; the bound is doubled) and work is less even over the steps, so it is asked for by name.
    """

    two_way: bool = False

    def turn(self, home: int, distances: tuple[int, ...], ranks: int) -> int:
        if not self.two_way:
            return len(distances)
        # Never to cross the last gap, which leads back home, is to go round one way; of equal gaps the last is avoided.
        gaps = [after - before for before, after in pairwise((0, *distances, ranks))]
        return max(range(len(gaps)), key=lambda i: (gaps[i], i))

    def most_rows(self, shard: int, backward: bool) -> int | None:
        return (2 if self.two_way else 1) * (3 if backward else 2) * shard


@dataclass(frozen=True)
class Halo(Neighbours):
    """Over contiguous shards, where each query sees keys near its own place: rows walk to the ranks behind and to the
    ranks before, as many hops as the window is long, and never round the ends of the sequence.

    A rank speaks to its two neighbours only and buffers few shards whatever the window, where `Gather` brings the same
    rows in one step from all their homes at once: the same where the window is no longer than a shard. A window that
    looks back only makes it the one-way ring. Refuses other layouts, in which neighbours in the sequence are none on
    the ring, and patterns in which some keys are seen by all queries behind them.
    """

    def turn(self, home: int, distances: tuple[int, ...], ranks: int) -> int:
        return sum(home + distance < ranks for distance in distances)

    def most_rows(self, shard: int, backward: bool) -> int | None:
        return 2 * (3 if backward else 2) * shard

    def refusal(self, asked: RouteRequest) -> str:
        layouts = {asked.q_layout.name, asked.kv_layout.name} - {"contiguous"}
        if layouts:
            return f"it takes contiguous shards, whose neighbours hold neighbouring rows; the layout is {layouts.pop()}"
        if not asked.pattern.near:
            return f"it takes patterns in which a query sees keys near its place, and {asked.pattern.text!r} is none"
        return ""


def stretches(home: int, needed: Needed, ranks: int) -> Iterator[tuple[range, tuple[int, ...]]]:
    """Cuts a piece where its users change: each stretch with the distances, forward round the ring, of its users."""
    edges = sorted({edge for pieces in needed.values() for rows in pieces for edge in (rows.start, rows.stop)})
    for start, stop in pairwise(edges):
        users = (user for user, pieces in needed.items() if any(start in rows for rows in pieces))
        yield range(start, stop), tuple(sorted((user - home) % ranks for user in users))


STRATEGIES: dict[str, Strategy] = {
    "local": NoExchange(),
    "halo": Halo(),
    "gather": Gather(),
    "ring": Ring(),
    "ring2": Ring(two_way=True),
    "gather_q": Gather(),
    "ring_q": Ring(),
    "merge": NoExchange(),
}

# Queries travel in place of keys and values, and their results come back: less where queries are few.
QUERIES_MOVE = ("gather_q", "ring_q")

# Queries are on every rank, each attends with its own keys, and the results are merged.
MERGE = "merge"


def strategy_of(name: str) -> Strategy:
    """The strategy called `name`: "ring" is the one-way ring, for the least memory (see Ring). Raises OptionError."""
    if name not in STRATEGIES:
        raise OptionError(f"strategy {name!r} is unknown; the strategies are {', '.join(map(repr, STRATEGIES))}")
    return STRATEGIES[name]
