"""Plans are proved: the checker on many random plans, enumeration of every pair beside it, and planted faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from ringopt.attention.check import check_peers, check_rank, check_return, prove, simulate
from ringopt.attention.exchange import Block, Cargo, Exchange, Message, Step, exchange_of
from ringopt.attention.layouts import Layout, Zigzag
from ringopt.attention.patterns import Kind, Pattern, Window
from ringopt.errors import PlanError
from tests.attention.drawing import exchanges

Plans = list[list[Step]]

many = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)


def unrolled(exchange: Exchange, backward: bool) -> Plans:
    return [list(exchange.steps(rank, backward)) for rank in range(exchange.ranks)]


def prove_all(exchange: Exchange, plans: Plans, backward: bool) -> None:
    """What `prove` asks of each rank, of plans that are not the exchange's own."""
    for rank, steps in enumerate(plans):
        check_rank(exchange, rank, steps, backward)
        check_peers(rank, steps, plans.__getitem__)


@given(exchanges(most_rows=200))
@settings(many, max_examples=8000)
def test_any_plan_is_proved(exchange: Exchange) -> None:
    for rank in range(exchange.ranks):
        prove(exchange, rank)


@given(exchanges(most_rows=200))
@settings(many, max_examples=2000)
def test_any_plan_ends_with_all_gradients_home(exchange: Exchange) -> None:
    """The world-wide checks agree with the local ones."""
    forward, backward = unrolled(exchange, False), unrolled(exchange, True)
    prove_all(exchange, forward, False)
    prove_all(exchange, backward, True)
    simulate(forward)
    simulate(backward)
    check_return(exchange, backward)


# Enumeration: every pair of query and key, with no code of the plan but its steps


def sees(pattern: Pattern, query: int, key: int) -> bool:
    far = isinstance(pattern, Window) and abs(query - key) >= pattern.width
    return not far and (key <= query or not pattern.causal)


def rows_of(layout: Layout) -> list[set[int]]:
    """The rows of each rank, from the definition of the layouts."""
    chunks = layout.ranks * (2 if isinstance(layout, Zigzag) else 1)
    rows: list[set[int]] = [set() for _ in range(layout.ranks)]
    for chunk in range(chunks):
        holder = chunk if chunk < layout.ranks else chunks - 1 - chunk
        rows[holder].update(range(layout.length * chunk // chunks, layout.length * (chunk + 1) // chunks))
    return rows


def pairs_of(pattern: Pattern, block: Block) -> list[tuple[int, int]]:
    """What a kernel computes for a block."""
    tile = [(query, key) for query in block.queries for key in block.keys]
    if block.kind is Kind.CAUSAL:
        return [(query, key) for query, key in tile if key - block.keys.start <= query - block.queries.start]
    return [pair for pair in tile if block.kind is Kind.FULL or sees(pattern, *pair)]


class Replay:
    """Runs a plan row by row: what each rank holds, and which queries each sum of gradients has met."""

    def __init__(self, exchange: Exchange, plans: Plans):
        self.pattern, self.plans = exchange.pattern, plans
        self.own_queries, self.own_keys = rows_of(exchange.q_layout), rows_of(exchange.kv_layout)
        self.held = [set(rows) for rows in self.own_keys]
        self.computed: Counter[tuple[int, int]] = Counter()
        self.met: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in plans]

    def run(self) -> None:
        for index in range(max(map(len, self.plans))):
            live = [(rank, plan[index]) for rank, plan in enumerate(self.plans) if index < len(plan)]
            mail = {message: self.parcel(message) for _, step in live for message in step.sends}
            for rank, step in live:
                for block in step.blocks:
                    self.compute(rank, block)
            for rank, step in live:
                for message in step.receives:
                    self.unpack(rank, message, mail.pop(message))
                self.held[rank] -= {row for rows in step.drops for row in rows}
            assert not mail, "sent and not received"

    def parcel(self, message: Message) -> dict[int, Counter[int]]:
        rows = [row for piece in message.rows for row in piece]
        if message.cargo is Cargo.BACK:
            return {row: self.met[message.source].pop(row, Counter()) for row in rows}
        assert self.held[message.source].issuperset(rows)
        return dict.fromkeys(rows, Counter())

    def unpack(self, rank: int, message: Message, parcel: dict[int, Counter[int]]) -> None:
        if message.cargo is Cargo.OUT:
            self.held[rank].update(parcel)
        for row, met in parcel.items():
            self.met[rank][row].update(met)

    def compute(self, rank: int, block: Block) -> None:
        assert self.own_queries[rank].issuperset(block.queries) and self.held[rank].issuperset(block.keys)
        for query, key in pairs_of(self.pattern, block):
            self.computed[query, key] += 1
            self.met[rank][key][query] += 1


@given(exchanges(most_rows=24))
@settings(many, max_examples=1500)
def test_every_pair_is_computed_once_and_its_gradient_comes_home(exchange: Exchange) -> None:
    pattern = exchange.pattern
    seen = [(query, key) for query in range(pattern.q_length) for key in range(pattern.kv_length)]
    seen = [pair for pair in seen if sees(pattern, *pair)]
    for backward in (False, True):
        replay = Replay(exchange, unrolled(exchange, backward))
        replay.run()
        assert replay.computed == Counter(seen)
        assert replay.held == replay.own_keys, "remote rows are left"
    for rank, met in enumerate(replay.met):
        home = {(query, key): times for key, queries in met.items() for query, times in queries.items()}
        assert home == {(query, key): 1 for query, key in seen if key in replay.own_keys[rank]}


# Planted faults: each takes right plans and spoils one thing, or returns False where there is nothing to spoil


def change(plans: Plans, rank: int, index: int, field: str, items: Sequence[object]) -> None:
    plans[rank][index] = replace(plans[rank][index], **{field: tuple(items)})


def without(items: Sequence[object], item: object) -> list[object]:
    rest = list(items)
    rest.remove(item)
    return rest


def pick(plans: Plans, random: Random, field: str, wanted: Callable[[object], bool] = bool):
    """(rank, step, item) of one of all items of a field that are wanted; None where there are none."""
    places = [
        (rank, index, item)
        for rank, plan in enumerate(plans)
        for index, step in enumerate(plan)
        for item in getattr(step, field)
        if wanted(item)
    ]
    return random.choice(places) if places else None


class Faults:
    """Every method plants its fault in `plans` and says whether it could."""

    def __init__(self, exchange: Exchange, plans: Plans, random: Random):
        self.exchange, self.plans, self.random = exchange, plans, random

    def edit(self, field: str, spoil: Callable[[object], list[object]], wanted: Callable[[object], bool] = bool) -> bool:
        """One item becomes those that `spoil` makes of it."""
        place = pick(self.plans, self.random, field, wanted)
        if place is None:
            return False
        rank, index, item = place
        change(self.plans, rank, index, field, [*without(getattr(self.plans[rank][index], field), item), *spoil(item)])
        return True

    def move(self, field: str, by: int, wanted: Callable[[object], bool] = bool) -> bool:
        """One item is moved by `by` steps."""
        place = pick(self.plans, self.random, field, wanted)
        if place is None or not 0 <= place[1] + by < len(self.plans[place[0]]):
            return False
        rank, index, item = place
        change(self.plans, rank, index, field, without(getattr(self.plans[rank][index], field), item))
        change(self.plans, rank, index + by, field, [*getattr(self.plans[rank][index + by], field), item])
        return True

    def edit_both(self, spoil: Callable[[Message], list[Message]], cargo: Cargo | None = None, by: int = 0) -> bool:
        """One message becomes others at both ends, `by` steps later."""
        place = pick(self.plans, self.random, "sends", lambda m: cargo in (None, m.cargo))
        if place is None:
            return False
        _, index, message = place
        ends = ((message.source, "sends"), (message.target, "receives"))
        if not all(0 <= index + by < len(self.plans[rank]) for rank, _ in ends):
            return False
        for rank, field in ends:
            change(self.plans, rank, index, field, without(getattr(self.plans[rank][index], field), message))
            new = [*getattr(self.plans[rank][index + by], field), *spoil(message)]
            change(self.plans, rank, index + by, field, new)
        return True

    def remote(self, block: Block) -> bool:
        """No rank has both its queries and its keys."""
        owner = self.exchange.q_layout.owner(block.queries.start)
        return self.exchange.kv_layout.owner(block.keys.start) != owner

    def block_lost(self) -> bool:
        return self.edit("blocks", lambda block: [])

    def block_doubled(self) -> bool:
        return self.edit("blocks", lambda block: [block, block])

    def block_of_another_kind(self) -> bool:
        return self.edit(
            "blocks", lambda block: [replace(block, kind=self.random.choice([k for k in Kind if k is not block.kind]))]
        )

    def block_without_its_last_key(self) -> bool:
        return self.edit("blocks", lambda block: [self.trimmed(block)], self.last_key_is_seen)

    def last_key_is_seen(self, block: Block) -> bool:
        return len(block.keys) > 1 and self.exchange.pattern.pairs(block.queries, block.keys[-1:]) > 0

    def trimmed(self, block: Block) -> Block:
        return Block(block.queries, block.keys[:-1], self.exchange.pattern.kind(block.queries, block.keys[:-1]))

    def block_of_another_rank(self) -> bool:
        place = pick(self.plans, self.random, "blocks")
        others = [rank for rank in range(self.exchange.ranks) if place and rank != place[0] and self.plans[rank]]
        if not others:
            return False
        rank, index, block = place
        other = self.random.choice(others)
        change(self.plans, rank, index, "blocks", without(self.plans[rank][index].blocks, block))
        change(self.plans, other, 0, "blocks", [*self.plans[other][0].blocks, block])
        return True

    def block_too_late(self) -> bool:
        return self.move("blocks", 1, self.remote)

    def block_too_early(self) -> bool:
        return self.move("blocks", -1, self.remote)

    def dropped_never(self) -> bool:
        return self.edit("drops", lambda rows: [])

    def dropped_twice(self) -> bool:
        return self.edit("drops", lambda rows: [rows, rows])

    def dropped_in_part(self) -> bool:
        return self.edit("drops", lambda rows: [rows[1:]], lambda rows: len(rows) > 1)

    def dropped_too_early(self) -> bool:
        return self.move("drops", -1)

    def dropped_too_late(self) -> bool:
        return self.move("drops", 1)

    def send_lost(self) -> bool:
        return self.edit("sends", lambda message: [])

    def receive_lost(self) -> bool:
        return self.edit("receives", lambda message: [])

    def send_too_late(self) -> bool:
        return self.move("sends", 1)

    def receive_too_early(self) -> bool:
        return self.move("receives", -1)

    def send_to_another_rank(self) -> bool:
        return self.edit("sends", lambda m: [replace(m, target=(m.target + 1) % self.exchange.ranks)])

    def send_to_itself(self) -> bool:
        return self.edit("sends", lambda m: [m, replace(m, target=m.source)])

    def receive_of_fewer_rows(self) -> bool:
        return self.edit("receives", lambda m: [replace(m, rows=m.rows[:-1])])

    def receive_of_other_order(self) -> bool:
        return self.edit("receives", lambda m: [replace(m, rows=m.rows[::-1])], lambda m: len(m.rows) > 1)

    def channel_in_other_order(self) -> bool:
        """Two messages from one rank to another in one step, received the other way round."""
        for rank, plan in enumerate(self.plans):
            for index, step in enumerate(plan):
                if len({m.source for m in step.receives}) < len(step.receives):
                    change(self.plans, rank, index, "receives", step.receives[::-1])
                    return True
        return False

    def message_lost(self) -> bool:
        return self.edit_both(lambda message: [])

    def message_doubled(self) -> bool:
        return self.edit_both(lambda message: [message, message])

    def message_of_other_cargo(self) -> bool:
        other = {Cargo.OUT: Cargo.BACK, Cargo.BACK: Cargo.OUT}
        return self.edit_both(lambda message: [replace(message, cargo=other[message.cargo])])

    def message_of_fewer_rows(self) -> bool:
        return self.edit_both(lambda m: [replace(m, rows=(*m.rows[:-1], m.rows[-1][:-1]))])

    def keys_too_late(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.OUT, by=1)

    def keys_too_early(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.OUT, by=-1)

    def gradients_lost(self) -> bool:
        return self.edit_both(lambda message: [], Cargo.BACK)

    def gradients_too_early(self) -> bool:
        return self.edit_both(lambda message: [message], Cargo.BACK, by=-1)


FAULTS = [name for name in vars(Faults) if name.startswith(("block_", "dropped", "send_", "receive_", "channel"))]
FAULTS += [name for name in vars(Faults) if name.startswith(("message_", "keys_", "gradients_"))]
SUBJECTS = [
    exchange_of(pattern, length, kv_length, ranks, layout, layout, strategy)
    for pattern in ("full", "causal", "window(5)", "window(9,both)")
    for length, kv_length in ((37, 37), (24, 31))
    for ranks in (2, 3, 5)
    for layout in ("contiguous", "zigzag")
    for strategy in ("ring", "ring2", "gather")
]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_refused(fault: str) -> None:
    planted = 0
    for number, exchange in enumerate(SUBJECTS):
        for backward in (False, True):
            plans = unrolled(exchange, backward)
            if getattr(Faults(exchange, plans, Random(number)), fault)():
                planted += 1
                with pytest.raises(PlanError):
                    prove_all(exchange, plans, backward)
    assert planted >= 10


# What the refusals say


@pytest.fixture
def ring() -> tuple[Exchange, Plans]:
    exchange = exchange_of("full", 9, 9, 3, "contiguous", "contiguous", "ring")
    return exchange, unrolled(exchange, False)


def test_a_refusal_names_rank_step_and_rows(ring: tuple[Exchange, Plans]) -> None:
    exchange, plans = ring
    plans[1][1] = replace(plans[1][1], drops=())
    with pytest.raises(PlanError, match=r"forward of rank 1: never drops rows 0:3\. This is a fault of ringopt's planner"):
        check_rank(exchange, 1, plans[1], backward=False)
    plans[1][0] = replace(plans[1][0], receives=())
    with pytest.raises(PlanError, match="forward of rank 1, step 1: uses rows 0:3 that it does not hold"):
        check_rank(exchange, 1, plans[1], backward=False)
    with pytest.raises(
        PlanError, match="step 0, rank 1 with rank 0: one sends out 0:3 0->1 where the other receives nothing"
    ):
        check_peers(1, plans[1], plans.__getitem__)


def test_missing_pairs_are_counted(ring: tuple[Exchange, Plans]) -> None:
    exchange, plans = ring
    plans[0][0] = replace(plans[0][0], blocks=())
    with pytest.raises(PlanError, match="rank 0: computes 18 pairs of 27"):
        check_rank(exchange, 0, plans[0], backward=False)


def test_a_deadlock_is_refused() -> None:
    """Two ranks that each wait for the other's second step."""
    to, fro = Message(0, 1, Cargo.OUT, (range(4),)), Message(1, 0, Cargo.OUT, (range(4, 8),))
    waiting = [[Step(sends=(to,)), Step(receives=(fro,))], [Step(sends=(fro,)), Step(receives=(to,))]]
    with pytest.raises(PlanError, match=r"deadlock: ranks 0, 1 wait in steps 0, 0"):
        simulate(waiting)


def test_a_gradient_that_stays_away_is_refused() -> None:
    exchange = exchange_of("causal", 24, 24, 3, "zigzag", "zigzag", "ring")
    plans = unrolled(exchange, backward=True)
    Faults(exchange, plans, Random(0)).gradients_lost()
    with pytest.raises(PlanError, match="which are not its own|are sent and not received|have no place"):
        check_return(exchange, plans)


def test_a_plan_over_its_bound_is_refused(monkeypatch: pytest.MonkeyPatch, ring: tuple[Exchange, Plans]) -> None:
    exchange, plans = ring
    monkeypatch.setattr(type(exchange.strategy), "most_rows", lambda self, shard, backward: 2 * shard - 1)
    with pytest.raises(PlanError, match="buffers 6 rows, the bound is 5"):
        check_rank(exchange, 0, plans[0], backward=False)


def test_a_proof_is_kept() -> None:
    exchange = exchange_of("causal", 1_000_000, 1_000_000, 8, "zigzag", "zigzag", "ring")
    assert prove(exchange, 3) is prove(exchange, 3)
    assert prove(exchange, 3)[0].keys == 250_000
