"""Predictions against what is known of a plan: its pairs, its bytes, and by hand on a machine of round numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ringopt.context_parallel.geometry.pattern import Full, Kind
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Block, Cargo
from ringopt.context_parallel.plan.head_exchange import head_exchange_of
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost.choose import Case, choose_layout, choose_strategy, duration, estimate
from ringopt.cost.memory import memory_of
from ringopt.cost.message_bytes import bytes_sent
from ringopt.cost.simulate import Heads, balance, pairs_of, simulate, tile_seconds
from ringopt.hardware.devices import Link
from ringopt.hardware.rates import Rates, Speed, cautious, rates_of

# 4 bytes a row of K and V; 4 FLOPs a pair forward, 10 backward.
ONE = Heads(1, 1, 1, 1, 1, 2, 4, "float16", "flash")
# A FLOP takes 1 s, a byte 1 s, merging nothing.
ROUND = Rates("round", Link("wire", 1.0, 0.0), Speed(1.0), touch=1e30)


def test_sizes_are_read_from_tensors() -> None:
    q, k, v = torch.empty(2, 8, 5, 16), torch.empty(2, 4, 7, 16), torch.empty(2, 4, 7, 32)
    heads = Heads.of(q, k, v, "math")
    assert heads == Heads(2, 8, 4, 16, 32, 4, 4, "float32", "math")
    assert (heads.row(), heads.flops(10, False)) == (2 * 4 * 48 * 4, 2 * 2 * 8 * 10 * 48)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(9)", "window(9,both)"])
def test_pairs_and_bytes_are_those_of_the_plan(pattern: str, ranks: int) -> None:
    length, heads = 67, Heads(1, 4, 2, 8, 8, 2, 4, "bfloat16", "flash_cpu")
    plan = exchange_of(ShardedPattern.of_self_attention(pattern, length, ranks, "zigzag"), "ring")
    seen = sum(len(plan.pattern.span(query)) for query in range(length))
    assert sum(pairs_of(plan, rank) for rank in range(ranks)) == seen
    forward, backward = (simulate(plan, heads, cautious(), way) for way in (False, True))
    for rank in range(ranks):
        assert forward.bytes[rank] == plan.sent_rows(rank, Cargo.OUT) * heads.row()
        back = plan.sent_rows(rank, Cargo.BACK, True) * heads.row(Cargo.BACK)
        assert backward.bytes[rank] == plan.sent_rows(rank, Cargo.OUT, True) * heads.row() + back
    assert sum(forward.flops) == heads.flops(seen, False) and sum(backward.flops) == heads.flops(seen, True)


def test_a_ring_on_the_clock() -> None:
    """8 rows on 2 ranks: 2 tiles of 16 pairs. Forward 64 s at home, beside 16 s of 16 bytes, and 64 s away; backward 16
    s until the first keys are there, 160 s beside nothing, 160 s beside gradients."""
    plan = exchange_of(ShardedPattern.of_self_attention("full", 8, 2, "contiguous"), "ring")
    forward, backward = simulate(plan, ONE, ROUND, False), simulate(plan, ONE, ROUND, True)
    assert (forward.seconds, forward.exposed) == (128.0, 0.0)
    assert (backward.seconds, backward.exposed) == (336.0, 16.0)
    shared = simulate(plan, ONE, dataclasses.replace(ROUND, overlap=0.0), False)
    assert (shared.seconds, shared.exposed) == (144.0, 16.0)
    slow = simulate(plan, ONE, dataclasses.replace(ROUND, link=Link("wire", 1.0, 100.0)), False)
    assert (slow.seconds, slow.exposed) == (180.0, 52.0)


def test_messages_one_way_may_take_less_than_both_ways() -> None:
    """Causal: rank 0 sends 16 bytes, rank 1 nothing; of zigzag shards, rank 0 sends 8 bytes and rank 1 sends 16."""
    shared = dataclasses.replace(ROUND, link=Link("shared", 1.0, 0.0, one_way=0.5))
    for layout, exchange in (("contiguous", 16 / 2), ("zigzag", (16 + 8) / 2)):
        plan = exchange_of(ShardedPattern.of_self_attention("causal", 8, 2, layout), "ring")
        spans = simulate(plan, ONE, shared, False, drawn=True).spans
        assert {span.stop - span.start for span in spans if span.kind == "exchange"} == {exchange}


def test_what_a_tile_gives_is_added_to_sums() -> None:
    """Two numbers are read and one is written, of 4 bytes, at a byte a second: of 5 queries 7 and the log-sum-exp.
    Backward the gradients of 9 keys, 10 numbers each, are counted twice beside them."""
    tile, heads = Block(range(5), range(9), Kind.FULL), dataclasses.replace(ONE, key_dim=3, value_dim=7)
    free = dataclasses.replace(ROUND, default=Speed(1e30), touch=1.0)
    forward, backward = (tile_seconds(Full(5, 9), tile, heads, free, way) for way in (False, True))
    assert forward == pytest.approx(3 * 5 * (7 + 1) * 4)
    assert backward == pytest.approx(3 * (5 * (7 + 1) + 2 * 9 * (3 + 7)) * 4)


def test_a_rank_waits_for_one_that_computes_longer() -> None:
    """Causal over contiguous shards: rank 0 has a triangle, rank 1 a triangle and a square."""
    plan = exchange_of(ShardedPattern.of_self_attention("causal", 8, 2, "contiguous"), "ring")
    spans = simulate(plan, ONE, ROUND, False, drawn=True).spans
    assert [(s.kind, s.start, s.stop) for s in spans if s.rank == 1 and s.kind == "compute"] == [
        ("compute", 0.0, 40.0),
        ("compute", 40.0, 104.0),
    ]


def test_a_message_waits_for_its_sender() -> None:
    """Rank 0 has 2 rows, the others 3: it is there after 16 s, rank 2 after 36 s, whose 12 bytes then come."""
    plan = exchange_of(ShardedPattern.of_self_attention("full", 8, 3, "contiguous"), "ring")
    spans = simulate(plan, ONE, ROUND, False, drawn=True).spans
    found = [(s.start, s.stop) for s in spans if s.rank == 0 and s.kind == "compute"]
    assert found == [(0.0, 16.0), (16.0, 40.0), (48.0, 72.0)]


def test_ulysses_computes_whole_attentions_of_its_heads() -> None:
    """4 heads on 2 ranks, 8 rows: 32 numbers of q, k, v and 8 of out and lse to the other rank; 2 heads of 64 pairs."""
    heads = dataclasses.replace(ONE, q_heads=4, kv_heads=4, itemsize=4, dtype="float32")
    plan = head_exchange_of(ShardedPattern.of_self_attention("full", 8, 2, "contiguous"), (4, 4))
    forward, backward = (simulate(plan, heads, ROUND, way) for way in (False, True))
    size = 4 * 4 * 2 * (3 + 2)
    assert (forward.bytes, forward.flops) == ((size,) * 2, (2 * 64 * 4,) * 2)
    assert (forward.seconds, forward.exposed) == (size + 512.0, size)
    assert backward.bytes[0] == bytes_sent(plan, heads, 0, True) and backward.flops[0] == 2 * 64 * 10


def test_a_hybrid_has_a_trade_within_nodes_and_a_ring_between() -> None:
    """4 heads on 2 nodes of 2 ranks, 8 rows: of 2 rows 24 numbers there and 8 back within the node, 320 bytes in all of
    the 2 heads of the other rank; then, of 2 heads, two tiles of 16 pairs and 64 bytes of 4 rows to the other node."""
    heads = dataclasses.replace(ONE, q_heads=4, kv_heads=4, itemsize=4, dtype="float32")
    plan = head_exchange_of(ShardedPattern.of_self_attention("full", 8, 4, "contiguous"), (4, 4), 2)
    near = simulate(plan, heads, ROUND, False)
    assert (near.bytes, near.flops) == ((80 + 64,) * 4, (2 * 2 * 16 * 4,) * 4)
    assert (near.seconds, near.exposed) == (80 + 128 + 128, 80)
    far = simulate(plan, heads, dataclasses.replace(ROUND, node=2, between=Link("far", 0.25, 0.0)), False)
    assert (far.seconds, far.exposed) == (80 + 256 + 128, 80 + 128)


def test_a_ring_waits_for_the_link_between_nodes() -> None:
    """Messages within nodes are beside it, and hidden. What ulysses trades goes over both: of 4 ranks, 1 is near."""
    ring = exchange_of(ShardedPattern.of_self_attention("full", 8, 4, "contiguous"), "ring")
    slow = dataclasses.replace(ROUND, node=2, between=Link("far", 0.25, 0.0))
    alone = dataclasses.replace(ROUND, link=Link("far", 0.25, 0.0))
    assert simulate(ring, ONE, slow, False).seconds == simulate(ring, ONE, alone, False).seconds
    heads = dataclasses.replace(ONE, q_heads=4, kv_heads=4)
    ulysses = head_exchange_of(ShardedPattern.of_self_attention("full", 8, 4, "contiguous"), (4, 4))
    traded = bytes_sent(ulysses, heads, 0)
    assert simulate(ulysses, heads, slow, False).exposed == pytest.approx(traded * 2 / 3 / 0.25)


def test_what_is_held_is_in_shards() -> None:
    """The ring has two shards beside its results, its own packed and one that comes; a gather one for each other rank,
    coming and packed."""
    sharded = ShardedPattern.of_self_attention("full", 64, 4, "contiguous")
    plans = {name: exchange_of(sharded, name) for name in ("ring", "gather")}
    heads = dataclasses.replace(ONE, key_dim=64, value_dim=64, itemsize=4)
    held = {name: memory_of(plan, heads, 0).forward for name, plan in plans.items()}
    assert held["gather"] - held["ring"] == pytest.approx(4 * 16 * heads.row(), rel=0.15)


def test_work_of_one_rank_alone_is_as_many_times_the_mean_as_there_are_ranks() -> None:
    """A single pair, too."""
    plan = exchange_of(ShardedPattern.of_self_attention("full", 1, 2, "contiguous"), "ring")
    assert sorted(pairs_of(plan, rank) for rank in range(2)) == [0, 1] and balance(plan) == 2


# ---- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("length", [1000, 4097])
def test_causal_work_is_even_in_the_layout_that_is_chosen(length: int, ranks: int) -> None:
    case = Case("causal", length, length, ONE, True)
    layout, why = choose_layout([case], ranks, "auto", ("contiguous", "zigzag"), cautious())
    assert layout == "zigzag" and why.startswith("layout zigzag: all sites take ")
    assert balance(case.plan(ranks, layout, "ring")) <= 1.05


def test_dear_steps_favour_a_gather_and_memory_forbids_it() -> None:
    """On 4 ranks a gather has 2 steps where a ring has 4. It holds more, which takes memory that is known."""
    heads = dataclasses.replace(ONE, key_dim=64, value_dim=64)
    case, dear = Case("full", 64, 64, heads, False), dataclasses.replace(ROUND, step=1e6)
    found = choose_strategy(case, 4, "contiguous", dear)
    assert found.strategy == "ring" and "gather 2," in found.reason and "but holds" in found.reason
    assert choose_strategy(case, 4, "contiguous", dataclasses.replace(dear, memory=64 * 2**20)).strategy == "gather"


def test_nodes_with_a_slow_link_between_them_favour_the_hybrid() -> None:
    """It is compared where there are several nodes, with another link between them than within, and heads enough."""
    heads = dataclasses.replace(ONE, q_heads=8, kv_heads=2, key_dim=64, value_dim=64, itemsize=4, dtype="float32")
    case, near = (
        Case("full", 64, 64, heads, True),
        dataclasses.replace(ROUND, link=Link("wire", 1e4, 0.0), default=Speed(1e6)),
    )
    far = dataclasses.replace(near, node=2, between=Link("far", 1.0, 0.0), memory=64 * 2**20)
    found = choose_strategy(case, 4, "contiguous", far)
    assert found.strategy == "hybrid(2)" and found.reason.startswith("strategy hybrid(2) ")
    few = dataclasses.replace(case, heads=dataclasses.replace(heads, q_heads=1, kv_heads=1))
    single = dataclasses.replace(far, node=1)
    for other, ranks, rates in ((case, 4, near), (case, 2, far), (case, 3, far), (few, 4, far), (case, 4, single)):
        estimates = choose_strategy(other, ranks, "contiguous", rates).estimates
        assert all(not one.strategy.startswith("hybrid") for one in estimates)


def test_of_close_ones_that_which_sends_less() -> None:
    found = choose_strategy(Case("window(9,both)", 64, 64, ONE, True), 4, "contiguous", cautious())
    ring = next(one for one in found.estimates if one.strategy == "ring")
    assert found.estimates[0].bytes < ring.bytes and found.strategy == found.estimates[0].strategy != "ring"


def test_queries_travel_where_few_of_them_see_all_keys() -> None:
    """The last 8 of 64 rows see all, all others their own 8: 8 queries to each rank, or all keys to the last."""
    rows = [*(f"{i}:{i + 1}" for i in range(7)), "0:8"]
    case = Case(f"blocks(8x8;{';'.join(rows)},both)", 64, 64, ONE, False)
    found = choose_strategy(case, 4, "contiguous", dataclasses.replace(ROUND, link=Link("wire", 0.1, 0.0)))
    assert found.strategy in ("gather_q", "ring_q") and "ring " in found.reason


def test_in_training_the_gradients_of_keys_that_are_made_count_however_they_travel() -> None:
    """On 2 ranks of 4 rows, each made in 100 s and in 300 s backward: 1600 s beside K and V. At 40 s a byte these take
    2784 s, and the latents, which are made on both ranks, 3968 s; at 20 s a byte 1504 s and 3808 s."""
    case = Case("full", 8, 8, dataclasses.replace(ONE, latent=1, latent_flops=100), True)
    wires = [dataclasses.replace(ROUND, link=Link("wire", 1 / seconds, 0.0)) for seconds in (20, 40)]
    assert [estimate(case, 2, "contiguous", "ring", rates).latent for rates in wires] == [False, True]


def test_many_ranks_are_compared_as_few() -> None:
    case = Case("causal", 2**20, 2**20, ONE, True)
    assert case.on_fewer(1024) == (Case("causal", 2**15, 2**15, ONE, True), 32)
    assert estimate(case, 1024, "zigzag", "ring", cautious()).seconds > 0


def test_the_layout_is_one_in_which_the_strategy_that_is_asked_for_can_be() -> None:
    cases, layouts = [Case("window(9)", 64, 64, ONE, False)], ("zigzag", "contiguous")
    assert choose_layout(cases, 4, "halo", layouts, cautious()) == ("contiguous", "")
    assert choose_layout(cases, 4, "local", layouts, cautious()) == ("zigzag", "")


def test_durations_have_three_digits() -> None:
    assert [duration(s) for s in (2.5, 0.0123456, 1.5e-5, 3e-8)] == ["2.5 s", "12.3 ms", "15 us", "0.03 us"]
    assert [duration(s) for s in (1.0, 1e-3, 1e-6)] == ["1 s", "1 ms", "1 us"]
    assert [duration(s) for s in (0.9994, 0.9996, 1234.0)] == ["999 ms", "1,000 ms", "1,234 s"]


@pytest.mark.parametrize(("ranks", "strategy"), [(8, "ulysses"), (16, "hybrid(8)")])
def test_heads_are_traded_within_nodes_of_h100(ranks: int, strategy: str) -> None:
    """Within a part of its memory: a bound of so many shards kept queries travelling, in three times the time."""
    heads, rows = Heads(1, 32, 32, 128, 128, 2, 4, "bfloat16", "cudnn", "cuda"), 8192 * ranks
    found = choose_strategy(Case("causal", rows, rows, heads, True), ranks, "zigzag", rates_of("h100"))
    assert found.strategy == strategy
    times = {one.strategy: one.seconds for one in found.estimates}
    assert times["ring_q"] > (2.5 if ranks == 16 else 1) * times[strategy]
