"""Proves a plan from its steps alone: nothing of how it was planned is believed.

    check_rank    one rank: every pair exactly once and no other; nothing is used before it came, nor comes before it is
                  used, nor stays after; buffers stay within the bound; each gradient it makes or is given goes on
    check_peers   one rank against those it talks to: every message has its other end, in the same step and place
    simulate      all ranks under rendezvous (a step ends when both ends of all its messages are posted): no deadlock
    check_return  the backward of all ranks: every gradient is home once, having met every block that made a part of it

The first two are local and are what `prove` asks at run time. Together, on every rank, they imply the other two: both
ends of a message being in one step, no rank can wait for ever, by induction over steps; and a gradient that is sent on
wherever it arrives except at home ends at home. The other two follow the plan of the whole world, in tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.rows import count, meet, overlap, rows_text, within
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Message, Step
from ringopt.errors import PlanError

Steps = Sequence[Step]


class Peak(NamedTuple):
    """The most rows buffered at any time beside a rank's own: remote ones held, ones on their way in, own ones on their
    way out. Keys and values of a row count as one, and so do their gradients; where queries move, `keys` counts these
    and `gradients` their results or gradients."""

    keys: int
    gradients: int


@lru_cache(maxsize=4096)
def prove(exchange: Exchange, rank: int) -> tuple[Peak, Peak]:
    """Proves the forward and the backward of `rank`; returns the peak of each. Raises PlanError. Cached.

    Every rank proving its own plan proves the plan.
    """
    backward = check_rank(exchange, rank, exchange.backward(rank), backward=True)
    check_peers(rank, exchange.backward(rank), exchange.backward)
    if exchange.queries_move:
        return backward, backward  # the same steps, with another cargo
    forward = check_rank(exchange, rank, exchange.forward(rank), backward=False)
    check_peers(rank, exchange.forward(rank), exchange.forward)
    return forward, backward


def check_rank(exchange: Exchange, rank: int, steps: Steps, backward: bool) -> Peak:
    """Coverage, lifetimes and gradients (or results, where queries move) of one rank."""
    keys, gradients, returns = _Keys(exchange, rank), _Gradients(exchange, rank), backward or exchange.queries_move
    for index, step in enumerate(steps):
        where = f"{'backward' if backward else 'forward'} of rank {rank}, step {index}"
        for message, here in [(m, m.source) for m in step.sends] + [(m, m.target) for m in step.receives]:
            _expect(here == rank, where, "posts an end that is not its own: {}", message)
            _expect(message.source != message.target, where, "has a message for itself: {}", message)
            _expect(returns or message.cargo is Cargo.OUT, where, "has gradients in the forward: {}", message)
            _expect(message.rows and all(message.rows), where, "has a message with nothing in it: {}", message)
        keys.follow(step, index, where)
        gradients.follow(step, returns, where)
    where = f"{'backward' if backward else 'forward'} of rank {rank}"
    _expect(not keys.last_use, where, "never drops rows {}", tuple(keys.last_use))
    _expect(not gradients.owed, where, "never sends on the gradients of rows {}", tuple(gradients.owed))
    check_coverage(exchange, rank, [block for step in steps for block in step.blocks])
    bound = exchange.strategy.most_rows(exchange.shard, returns)
    peak = Peak(keys.peak, gradients.peak)
    _expect(bound is None or max(peak) <= bound, where, "buffers {} rows, the bound is {}", max(peak), bound)
    return peak


class _Keys:
    """Follows the keys that a rank holds, or the queries, where these move."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.pattern, self.home = exchange, exchange.pattern, exchange.home(rank)
        self.staying = exchange.kv_pieces(rank) if exchange.queries_move else exchange.q_pieces(rank)
        self.last_use: dict[range, int | None] = {}  # of each remote piece held
        self.peak = 0

    def follow(self, step: Step, index: int, where: str) -> None:
        leaving = [rows for m in step.sends if m.cargo is Cargo.OUT for rows in m.rows]
        arriving = [rows for m in step.receives if m.cargo is Cargo.OUT for rows in m.rows]
        own = [rows for rows in leaving if _holder(rows, self.home)]
        self.peak = max(self.peak, count(self.last_use) + count(arriving) + count(own))
        for block in step.blocks:
            stays = block.keys if self.exchange.queries_move else block.queries
            _expect(_holder(stays, self.staying), where, "computes with rows that stay on another rank: {}", block)
            seen = self.pattern.kind(block.queries, block.keys)
            _expect(block.kind is seen is not Kind.EMPTY, where, "computes {}, which is {}", block, seen.value)
        for rows in (*leaving, *map(self.exchange.moved, step.blocks)):
            if not _holder(rows, self.home):
                held = _holder(rows, self.last_use)
                if held is None:
                    raise _fault(where, "uses rows {} that it does not hold", rows)
                self.last_use[held] = index
        for rows in step.drops:
            _expect(rows in self.last_use, where, "drops rows {} that it does not hold", rows)
            used = self.last_use.pop(rows)
            _expect(used == index, where, "drops rows {}, last used in step {}", rows, used)
        idle = [rows for rows, used in self.last_use.items() if used is None]
        _expect(not idle, where, "has no use for rows {}, which came a step before", idle)
        for rows in arriving:
            twice = any(meet(rows, other) for other in (*self.home, *self.last_use))
            _expect(not twice, where, "is sent rows {} that it holds", rows)
            self.last_use[rows] = None


class _Gradients:
    """Follows the gradients of remote rows that a rank owes to the next stop on their way home."""

    def __init__(self, exchange: Exchange, rank: int):
        self.exchange, self.home = exchange, exchange.home(rank)
        self.owed: set[range] = set()
        self.peak = 0

    def follow(self, step: Step, returns: bool, where: str) -> None:
        leaving = [rows for m in step.sends if m.cargo is Cargo.BACK for rows in m.rows]
        arriving = [rows for m in step.receives if m.cargo is Cargo.BACK for rows in m.rows]
        self.peak = max(self.peak, count(self.owed) + count(arriving))
        for rows in leaving:
            _expect(rows in self.owed, where, "sends gradients of rows {} that it does not owe", rows)
            self.owed.discard(rows)
        if returns:
            # Rows that came in an earlier step are owed from then on, so a block finds the sum that it adds to.
            for block in step.blocks:
                rows = self.exchange.moved(block)
                whole = _holder(rows, self.home) or _holder(rows, self.owed)
                _expect(whole, where, "has no sum that the gradients of {} would add to", block)
            self.owed.update(rows for m in step.receives if m.cargo is Cargo.OUT for rows in m.rows)
        self.owed.update(rows for rows in arriving if not _holder(rows, self.home))


def check_coverage(exchange: Exchange, rank: int, blocks: Sequence[Block]) -> None:
    """Tiles do not overlap, and together have as many seen pairs as all queries of the rank with all keys that
    take part (or all keys of the rank with all queries): so each seen pair is in exactly one of them."""
    for group in _groups(blocks):
        open_tiles: list[Block] = []
        for tile in sorted(group, key=lambda tile: tile.keys.start):
            open_tiles = [other for other in open_tiles if other.keys.stop > tile.keys.start]
            for other in open_tiles:
                twice = overlap(tile.queries, other.queries) and overlap(tile.keys, other.keys)
                _expect(not twice, f"rank {rank}", "computes pairs twice: {} and {}", tile, other)
            open_tiles.append(tile)
    pairs, everything = exchange.pattern.pairs, [range(exchange.pattern.kv_length)]
    if exchange.part != (0, 1):
        everything = [rows for other in range(exchange.ranks) for rows in exchange.kv_pieces(other)]
    computed = sum(pairs(tile.queries, tile.keys) for tile in blocks)
    if exchange.queries_move:
        wanted = sum(pairs(range(exchange.pattern.q_length), own) for own in exchange.kv_pieces(rank))
    else:
        wanted = sum(pairs(own, keys) for own in exchange.q_pieces(rank) for keys in everything)
    _expect(computed == wanted, f"rank {rank}", "computes {} pairs of {}", computed, wanted)


def _groups(blocks: Sequence[Block]) -> list[list[Block]]:
    """Tiles of different groups share no key: those whose keys are the widest step apart, by where they begin; each
    group with all other tiles."""
    widest = max((tile.keys.step for tile in blocks), default=1)
    groups: dict[int, list[Block]] = defaultdict(list)
    for tile in blocks:
        if tile.keys.step == widest:
            groups[tile.keys.start % widest].append(tile)
    rest = [tile for tile in blocks if tile.keys.step < widest]
    return [[*group, *rest] for group in groups.values()]


def check_peers(rank: int, steps: Steps, steps_of: Callable[[int], Steps]) -> None:
    """Both ends of every message of `rank` are in the same step, and in the same place of their channel."""
    for index, step in enumerate(steps):
        for peer in {*step.sends_to, *step.receives_from}:
            theirs = steps_of(peer)
            other = theirs[index] if index < len(theirs) else Step()
            out = step.sends_to.get(peer, []), other.receives_from.get(rank, [])
            back = other.sends_to.get(rank, []), step.receives_from.get(peer, [])
            for sent, received in (out, back):
                if sent != received:
                    where = f"step {index}, rank {rank} with rank {peer}"
                    raise _fault(where, "one sends {} where the other receives {}", sent, received)


def simulate(plans: Sequence[Steps]) -> None:
    """Runs the plans of all ranks: a rank ends a step when all messages of the step are posted at both ends."""
    at = [-1] * len(plans)
    sent: set[Message] = set()
    received: set[Message] = set()
    ready = list(range(len(plans)))
    while ready:
        for rank in ready:
            at[rank] += 1
            if at[rank] < len(plans[rank]):
                sent.update(plans[rank][at[rank]].sends)
                received.update(plans[rank][at[rank]].receives)
        waiting = {rank: plan[at[rank]] for rank, plan in enumerate(plans) if at[rank] < len(plan)}
        ready = [rank for rank, step in waiting.items() if received >= set(step.sends) and sent >= set(step.receives)]
        _expect(ready or not waiting, "deadlock", "ranks {} wait in steps {}", list(waiting), at)


def check_return(exchange: Exchange, plans: Sequence[Steps]) -> None:
    """Follows each gradient of the backward through all ranks, as the list of the (rank, block) that it sums."""
    sums: list[dict[range, list[tuple[int, Block]]]] = [defaultdict(list) for _ in plans]
    for index in range(max(map(len, plans), default=0)):
        live = [(rank, plan[index]) for rank, plan in enumerate(plans) if index < len(plan)]
        back = [(rank, m, rows) for rank, step in live for m in step.sends if m.cargo is Cargo.BACK for rows in m.rows]
        mail = {(m, rows): sums[rank].pop(rows, []) for rank, m, rows in back}
        for rank, step in live:
            pieces = (*exchange.home(rank), *_remote(plans[rank]))
            for block in step.blocks:
                sums[rank][_require(exchange.moved(block), pieces)].append((rank, block))
            for m in step.receives:
                for rows in m.rows if m.cargo is Cargo.BACK else ():
                    sums[rank][_require(rows, pieces)].extend(mail.pop((m, rows)))
        _expect(not mail, f"step {index}", "gradients were sent and not received: {}", [m for m, _ in mail])
    made = sorted((rank, str(block)) for rank, plan in enumerate(plans) for step in plan for block in step.blocks)
    come = sorted((rank, str(block)) for ledger in sums for parts in ledger.values() for rank, block in parts)
    _expect(made == come, "backward", "has {} parts of gradients, of which {} arrive", len(made), len(come))
    for rank, ledger in enumerate(sums):
        away = [rows for rows, parts in ledger.items() if parts and rows not in exchange.home(rank)]
        _expect(not away, f"rank {rank}", "keeps gradients of rows {}, which are not its own", tuple(away))


def _remote(steps: Steps) -> list[range]:
    return [rows for step in steps for m in step.receives for rows in m.rows]


def _require(rows: range, pieces: Iterable[range]) -> range:
    holder = _holder(rows, pieces)
    if holder is None:
        raise _fault("backward", "has no place for gradients of rows {} among rows {}", rows, tuple(pieces))
    return holder


def _holder(rows: range, pieces: Iterable[range]) -> range | None:
    """The piece that holds all of `rows`."""
    for piece in pieces:
        if within(rows, piece):
            return piece
    return None


def _expect(truth: object, where: str, fault: str, *facts: Any) -> None:
    if not truth:
        raise _fault(where, fault, *facts)


def _fault(where: str, fault: str, *facts: Any) -> PlanError:
    facts_text = fault.format(*map(_fact_text, facts))
    return PlanError(f"{where}: {facts_text}. This is a fault of ringopt's planner: please report it")


def _fact_text(fact: Any) -> str:
    if isinstance(fact, range):
        return rows_text([fact])
    if isinstance(fact, (tuple, list)):
        return ", ".join(map(_fact_text, fact)) or "nothing"
    return str(fact)
