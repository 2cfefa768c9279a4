"""Plans are proved: the checker on many random plans, enumeration of every pair beside it, and planted faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest

from ringopt.context_parallel.geometry.layouts import Layout, Replicated, Zigzag
from ringopt.context_parallel.geometry.pattern import Kind, Pattern
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Message, Step
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.prove import check_peers, check_rank, check_return, prove, simulate
from ringopt.errors import PlanError
from tests.context_parallel.drawing import exchanges, sees
from tests.context_parallel.faults import FAULTS, Faults, Plans


def unrolled(exchange: Exchange, backward: bool) -> Plans:
    return [list(exchange.steps(rank, backward)) for rank in range(exchange.ranks)]


def prove_all(exchange: Exchange, plans: Plans, backward: bool) -> None:
    """What `prove` asks of each rank, of plans that are not the exchange's own."""
    for rank, steps in enumerate(plans):
        check_rank(exchange, rank, steps, backward)
        check_peers(rank, steps, plans.__getitem__)


@pytest.mark.sample(20)
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_any_plan_is_proved(first: int) -> None:
    """Pattern, layouts, strategy, ranks to 16, lengths to 200: by the checks that run before a plan is used."""
    for exchange in exchanges(500, most_rows=200, first=first):
        for rank in range(exchange.ranks):
            prove(exchange, rank)


def test_any_plan_ends_with_all_gradients_home() -> None:
    """The world-wide checks agree with the local ones."""
    for exchange in exchanges(500, most_rows=200):
        forward, backward = unrolled(exchange, False), unrolled(exchange, True)
        simulate(forward)
        simulate(backward)
        if not exchange.kv_layout.name == exchange.q_layout.name == "replicated":
            check_return(exchange, backward)


# Enumeration: every pair of query and key, with no code of the plan but its steps


def rows_of(layout: Layout) -> list[set[int]]:
    """The rows of each rank, from the definition of the layouts."""
    if isinstance(layout, Replicated):
        return [set(range(layout.length)) for _ in range(layout.ranks)]
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
    """Runs a plan row by row: what each rank holds of the side that travels (keys, or queries), and which rows of the
    other side each sum of gradients or results has met."""

    def __init__(self, exchange: Exchange, plans: Plans):
        self.pattern, self.plans, self.queries_move = exchange.pattern, plans, exchange.queries_move
        sides = rows_of(exchange.q_layout), rows_of(exchange.kv_layout)
        self.staying, self.home = reversed(sides) if self.queries_move else sides
        self.held = [set(rows) for rows in self.home]
        self.replicated = "replicated" in (exchange.q_layout.name, exchange.kv_layout.name)
        self.computed: Counter[tuple[int, int]] = Counter()
        self.met: list[dict[int, Counter[int]]] = [defaultdict(Counter) for _ in plans]

    def meets(self, rank: int, other: int) -> bool:
        """Whether what is at home on `rank` comes to a row of the other side: all do, but for rows that every rank has
        whole, of which each keeps its part."""
        return not self.replicated or other in self.staying[rank]

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
        return {row: Counter() for row in rows}

    def unpack(self, rank: int, message: Message, parcel: dict[int, Counter[int]]) -> None:
        if message.cargo is Cargo.OUT:
            self.held[rank].update(parcel)
        for row, met in parcel.items():
            self.met[rank][row].update(met)

    def compute(self, rank: int, block: Block) -> None:
        staying, moved = (block.keys, block.queries) if self.queries_move else (block.queries, block.keys)
        assert self.staying[rank].issuperset(staying) and self.held[rank].issuperset(moved)
        for query, key in pairs_of(self.pattern, block):
            self.computed[query, key] += 1
            self.met[rank][query if self.queries_move else key][key if self.queries_move else query] += 1


def test_every_pair_is_computed_once_and_its_gradient_comes_home() -> None:
    for exchange in exchanges(500, most_rows=24):
        check_pairs(exchange)


def check_pairs(exchange: Exchange) -> None:
    pattern = exchange.pattern
    seen = [(query, key) for query in range(pattern.q_length) for key in range(pattern.kv_length)]
    seen = [pair for pair in seen if sees(pattern, *pair)]
    for backward in (False, True):
        replay = Replay(exchange, unrolled(exchange, backward))
        replay.run()
        assert replay.computed == Counter(seen)
        assert replay.held == replay.home, "remote rows are left"
    for rank, met in enumerate(replay.met):
        came = {(row, other): times for row, others in met.items() for other, times in others.items()}
        pairs = (pair if exchange.queries_move else pair[::-1] for pair in seen)
        assert came == {
            (row, other): 1 for row, other in pairs if row in replay.home[rank] and replay.meets(rank, other)
        }


# Planted faults


PLANS = [
    exchange_of(ShardedPattern(pattern, length, kv_length, ranks, layout, layout), strategy)
    for pattern in ("full", "causal", "window(5)", "window(9,both)", "window(5,sinks=3)", "prefix(7)", "chunked(15)")
    for length, kv_length in ((37, 37), (24, 31))
    for ranks in (2, 3, 5)
    for layout in ("contiguous", "zigzag")
    for strategy in ("ring", "ring2", "gather", "ring_q", "gather_q")
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_refused(fault: str) -> None:
    planted = 0
    for number, exchange in enumerate(PLANS):
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
    exchange = exchange_of(ShardedPattern.of_self_attention("full", 9, 3, "contiguous"), "ring")
    return exchange, unrolled(exchange, False)


def test_a_refusal_names_rank_step_and_rows(ring: tuple[Exchange, Plans]) -> None:
    exchange, plans = ring
    plans[1][1] = replace(plans[1][1], drops=())
    with pytest.raises(
        PlanError, match=r"forward of rank 1: never drops rows 0:3\. This is a fault of ringopt's planner"
    ):
        check_rank(exchange, 1, plans[1], backward=False)
    plans[1][0] = replace(plans[1][0], receives=())
    with pytest.raises(PlanError, match="forward of rank 1, step 1: uses rows 0:3 that it does not hold"):
        check_rank(exchange, 1, plans[1], backward=False)
    with pytest.raises(
        PlanError, match="step 0, rank 0 with rank 1: one sends out 0:3 0->1 where the other receives nothing"
    ):
        check_peers(0, plans[0], plans.__getitem__)


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
    exchange = exchange_of(ShardedPattern.of_self_attention("causal", 24, 3, "zigzag"), "ring")
    plans = unrolled(exchange, backward=True)
    Faults(exchange, plans, Random(0)).gradients_lost()
    with pytest.raises(
        PlanError, match=r"gradients were sent and not received|of which .* arrive|which are not its own"
    ):
        check_return(exchange, plans)


def test_a_plan_over_its_bound_is_refused(monkeypatch: pytest.MonkeyPatch, ring: tuple[Exchange, Plans]) -> None:
    exchange, plans = ring
    monkeypatch.setattr(type(exchange.strategy), "most_rows", lambda self, shard, backward: 2 * shard - 1)
    with pytest.raises(PlanError, match="buffers 6 rows, the bound is 5"):
        check_rank(exchange, 0, plans[0], backward=False)


def test_a_proof_is_kept() -> None:
    exchange = exchange_of(ShardedPattern.of_self_attention("causal", 1_000_000, 8, "zigzag"), "ring")
    assert prove(exchange, 3) is prove(exchange, 3)
    assert prove(exchange, 3)[0].keys == 250_000


def test_gradients_that_nobody_receives_are_named() -> None:
    """That they are missing at home is seen as well, but not on which way they were lost."""
    for exchange in exchanges(40, most_rows=40):
        plans = unrolled(exchange, True)
        for rank, steps in enumerate(plans):
            for index, step in enumerate(steps):
                lost = [message for message in step.receives if message.cargo is Cargo.BACK]
                if lost and exchange.kv_layout.name != "replicated":
                    kept = tuple(message for message in step.receives if message is not lost[0])
                    plans[rank] = [*steps[:index], replace(step, receives=kept), *steps[index + 1 :]]
                    with pytest.raises(PlanError, match=rf"step {index}: gradients were sent and not received"):
                        check_return(exchange, plans)
                    return
    raise AssertionError("no plan sends gradients back")
