"""Small plans written out, and laws of all plans."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from expecttest import assert_expected_inline

from ringopt.context_parallel.geometry.layouts import Contiguous, Zigzag
from ringopt.context_parallel.geometry.pattern import Full, Kind
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Step
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.prove import prove
from ringopt.context_parallel.plan.strategies import Ring
from ringopt.errors import OptionError, PlanError

RANKS = [1, 2, 3, 4, 8, 16]


def plan(pattern: str, length: int, ranks: int, layout: str, strategy: str) -> Exchange:
    return exchange_of(ShardedPattern.of_self_attention(pattern, length, ranks, layout), strategy)


def written(exchange: Exchange, backward: bool = False, ranks: Sequence[int] | None = None) -> str:
    lines = []
    for rank in ranks or range(exchange.ranks):
        lines += [f"rank {rank}", *(f"  {step}" for step in exchange.steps(rank, backward))]
    return "\n".join(lines)


def test_ring_full_forward() -> None:
    assert_expected_inline(
        written(plan("full", 9, 3, "contiguous", "ring")),
        """\
rank 0
  receive out 6:9 2->0; send out 0:3 0->1; full 0:3 x 0:3
  receive out 3:6 2->0; send out 6:9 0->1; full 0:3 x 6:9; drop 6:9
  full 0:3 x 3:6; drop 3:6
rank 1
  receive out 0:3 0->1; send out 3:6 1->2; full 3:6 x 3:6
  receive out 6:9 0->1; send out 0:3 1->2; full 3:6 x 0:3; drop 0:3
  full 3:6 x 6:9; drop 6:9
rank 2
  receive out 3:6 1->2; send out 6:9 2->0; full 6:9 x 6:9
  receive out 0:3 1->2; send out 3:6 2->0; full 6:9 x 3:6; drop 3:6
  full 6:9 x 0:3; drop 0:3""",
    )


def test_ring_causal_zigzag_forward() -> None:
    assert_expected_inline(
        written(plan("causal", 12, 3, "zigzag", "ring")),
        """\
rank 0
  receive out 4:8 2->0; send out 0:2 0->1; causal 0:2 x 0:2; full 10:12 x 0:2; causal 10:12 x 10:12
  receive out 2:4,8:10 2->0; send out 4:8 0->1; full 10:12 x 4:8; drop 4:8
  full 10:12 x 2:4; full 10:12 x 8:10; drop 2:4,8:10
rank 1
  receive out 0:2 0->1; send out 2:4,8:10 1->2; causal 2:4 x 2:4; full 8:10 x 2:4; causal 8:10 x 8:10
  receive out 4:8 0->1; send out 0:2 1->2; full 2:4 x 0:2; full 8:10 x 0:2; drop 0:2
  full 8:10 x 4:8; drop 4:8
rank 2
  receive out 2:4,8:10 1->2; send out 4:8 2->0; causal 4:8 x 4:8
  receive out 0:2 1->2; send out 2:4,8:10 2->0; full 4:8 x 2:4; drop 2:4,8:10
  full 4:8 x 0:2; drop 0:2""",
    )


def test_ring_causal_zigzag_backward() -> None:
    assert_expected_inline(
        written(plan("causal", 12, 3, "zigzag", "ring"), backward=True),
        """\
rank 0
  receive out 2:4,8:10 1->0; send out 0:2 0->2
  receive out 4:8 1->0; send out 2:4 0->2; full 10:12 x 2:4; full 10:12 x 8:10; drop 2:4,8:10
  receive back 4:8 1->0; send back 2:4,8:10 0->2; full 10:12 x 4:8; drop 4:8
  receive back 0:2 1->0; send back 4:8 0->2; causal 0:2 x 0:2; full 10:12 x 0:2; causal 10:12 x 10:12
rank 1
  receive out 4:8 2->1; send out 2:4,8:10 1->0
  receive out 0:2 2->1; send out 4:8 1->0; full 8:10 x 4:8; drop 4:8
  receive back 0:2 2->1; send back 4:8 1->0; full 2:4 x 0:2; full 8:10 x 0:2; drop 0:2
  receive back 2:4,8:10 2->1; send back 0:2 1->0; causal 2:4 x 2:4; full 8:10 x 2:4; causal 8:10 x 8:10
rank 2
  receive out 0:2 0->2; send out 4:8 2->1
  receive out 2:4 0->2; send out 0:2 2->1; full 4:8 x 0:2; drop 0:2
  receive back 2:4,8:10 0->2; send back 0:2 2->1; full 4:8 x 2:4; drop 2:4
  receive back 4:8 0->2; send back 2:4,8:10 2->1; causal 4:8 x 4:8""",
    )


def test_two_way_ring_sends_heads_forth_and_tails_back() -> None:
    exchange = plan("causal", 12, 3, "zigzag", "ring2")
    assert_expected_inline(
        "\n".join(map(str, exchange.forward(1))),
        """\
receive out 0:2 0->1; send out 8:10 1->0; send out 2:4 1->2; causal 2:4 x 2:4; full 8:10 x 2:4; causal 8:10 x 8:10
receive out 4:8 0->1; send out 0:2 1->2; full 2:4 x 0:2; full 8:10 x 0:2; drop 0:2
full 8:10 x 4:8; drop 4:8""",
    )


def test_gather_of_a_window_is_a_halo() -> None:
    assert_expected_inline(
        written(plan("window(3)", 12, 3, "contiguous", "gather")),
        """\
rank 0
  send out 2:4 0->1; partial 0:4 x 0:4
rank 1
  receive out 2:4 0->1; send out 6:8 1->2; partial 4:8 x 4:8
  partial 4:6 x 2:4; drop 2:4
rank 2
  receive out 6:8 1->2; partial 8:12 x 8:12
  partial 8:10 x 6:8; drop 6:8""",
    )


def test_a_halo_walks_both_ways_and_not_round_the_ends() -> None:
    """Three keys on either side over shards of two: two hops."""
    assert_expected_inline(
        written(plan("window(4,both)", 6, 3, "contiguous", "halo"), ranks=(0, 2)),
        """\
rank 0
  receive out 2:4 1->0; send out 0:1,1:2 0->1; full 0:2 x 0:2
  receive out 4:5 1->0; full 0:2 x 2:4; drop 2:4
  full 1:2 x 4:5; drop 4:5
rank 2
  receive out 2:4 1->2; send out 4:5,5:6 2->1; full 4:6 x 4:6
  receive out 1:2 1->2; full 4:6 x 2:4; drop 2:4
  full 4:5 x 1:2; drop 1:2""",
    )


def test_ring_of_a_window_carries_each_row_to_its_last_user() -> None:
    assert_expected_inline(
        written(plan("window(6)", 12, 3, "contiguous", "ring")),
        """\
rank 0
  send out 0:3,3:4 0->1; causal 0:4 x 0:4
rank 1
  receive out 0:3,3:4 0->1; send out 4:8 1->2; causal 4:8 x 4:8
  send out 3:4 1->2; partial 4:8 x 0:3; full 4:8 x 3:4; drop 0:3,3:4
rank 2
  receive out 4:8 1->2; causal 8:12 x 8:12
  receive out 3:4 1->2; partial 8:12 x 4:8; drop 4:8
  full 8:9 x 3:4; drop 3:4""",
    )


def test_cross_attention_of_more_ranks_than_keys() -> None:
    exchange = exchange_of(ShardedPattern("causal", 7, 2, 4, "contiguous", "contiguous"), "ring")
    assert_expected_inline(
        written(exchange),
        """\
rank 0
  receive out 1:2 3->0
  send out 1:2 0->1; drop 1:2
  receive out 0:1 3->0
  full 0:1 x 0:1; drop 0:1
rank 1
  send out 0:1 1->2; full 1:3 x 0:1
  receive out 1:2 0->1
  send out 1:2 1->2; full 1:3 x 1:2; drop 1:2
rank 2
  receive out 0:1 1->2
  send out 0:1 2->3; full 3:5 x 0:1; drop 0:1
  receive out 1:2 1->2
  full 3:5 x 1:2; drop 1:2
rank 3
  send out 1:2 3->0; full 5:7 x 1:2
  receive out 0:1 2->3
  send out 0:1 3->0; full 5:7 x 0:1; drop 0:1""",
    )


def shards(exchange: Exchange) -> list[int]:
    return [sum(map(len, exchange.kv_layout.ranges(rank))) for rank in range(exchange.ranks)]


@pytest.mark.parametrize("length", [3, 64, 997])
@pytest.mark.parametrize("ranks", RANKS)
class TestVolume:
    """Rows sent by all ranks; lengths that p does not divide included."""

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    @pytest.mark.parametrize("strategy", ["ring", "ring2", "gather"])
    def test_full(self, length: int, ranks: int, layout: str, strategy: str) -> None:
        """Every row visits every rank that has queries."""
        exchange = plan("full", length, ranks, layout, strategy)
        if length >= 2 * ranks:
            assert exchange.volume == length * (ranks - 1)

    @pytest.mark.parametrize("strategy", ["ring", "ring2", "gather"])
    def test_causal_contiguous(self, length: int, ranks: int, strategy: str) -> None:
        exchange = plan("causal", length, ranks, "contiguous", strategy)
        if length >= ranks:
            assert exchange.volume == sum(rows * (ranks - 1 - rank) for rank, rows in enumerate(shards(exchange)))

    def test_causal_zigzag(self, length: int, ranks: int) -> None:
        if length < 2 * ranks:
            pytest.skip("chunks without rows")
        layout = Zigzag(length, ranks)
        heads = [layout.edge(rank + 1) - layout.edge(rank) for rank in range(ranks)]
        tails = [layout.edge(2 * ranks - rank) - layout.edge(2 * ranks - 1 - rank) for rank in range(ranks)]
        needed = sum(heads) * (ranks - 1) + sum(rank * tail for rank, tail in enumerate(tails))
        assert plan("causal", length, ranks, "zigzag", "gather").volume == needed
        assert plan("causal", length, ranks, "zigzag", "ring2").volume == needed
        assert plan("causal", length, ranks, "zigzag", "ring").volume == (length - tails[0]) * (ranks - 1)
        if length % (2 * ranks) == 0:
            assert 4 * needed == 3 * length * (ranks - 1)

    @pytest.mark.parametrize("width", [1, 2, 7, 80, 2000])
    @pytest.mark.parametrize("strategy", ["ring", "ring2", "gather"])
    def test_window_moves_the_exact_halo(self, length: int, ranks: int, width: int, strategy: str) -> None:
        exchange = plan(f"window({width})", length, ranks, "contiguous", strategy)
        starts = [rows[0].start for rank in range(ranks) if (rows := exchange.q_layout.ranges(rank))]
        halos = sum(min(width - 1, start) for start in starts)
        if strategy == "gather" or length >= ranks:  # on a ring, rows also pass ranks that have none
            assert exchange.volume == halos

    @pytest.mark.parametrize("pattern", ["full", "causal", "window(9)", "window(9,both)"])
    @pytest.mark.parametrize("strategy", ["ring", "ring2", "gather"])
    def test_backward_sends_as_many_gradients_and_no_more_keys(
        self, length: int, ranks: int, pattern: str, strategy: str
    ) -> None:
        exchange = plan(pattern, length, ranks, "zigzag", strategy)
        everyone = range(ranks)
        assert sum(exchange.sent_rows(rank, Cargo.OUT) for rank in everyone) == exchange.volume
        assert sum(exchange.sent_rows(rank, Cargo.BACK, backward=True) for rank in everyone) == exchange.volume
        assert sum(exchange.sent_rows(rank, Cargo.OUT, backward=True) for rank in everyone) <= exchange.volume
        assert sum(exchange.sent_rows(rank, Cargo.BACK) for rank in everyone) == 0


@pytest.mark.parametrize("width", [2, 9, 30, 200])
@pytest.mark.parametrize("pattern", ["window({})", "window({},both)"])
def test_a_halo_moves_the_rows_of_a_gather(pattern: str, width: int) -> None:
    halo, gather = (plan(pattern.format(width), 64, 8, "contiguous", strategy) for strategy in ("halo", "gather"))
    assert halo.volume == gather.volume
    ends = {(m.source, m.target) for rank in range(8) for step in halo.forward(rank) for m in step.sends}
    assert {target - source for source, target in ends} <= {1, -1}
    assert halo.length == min(7, -(-(width - 1) // 8))


def test_local_needs_no_rows_of_others() -> None:
    assert plan("window(1)", 64, 4, "zigzag", "local").volume == 0
    assert plan("causal", 64, 1, "zigzag", "local").volume == 0
    with pytest.raises(
        OptionError,
        match=r"strategy 'local' cannot do window\(4\) of 64 queries over 64 keys on 4 ranks: it moves no rows, and "
        r"rank 1 needs 3 of other ranks: rows 13:16\. Take another strategy, or 'auto'",
    ):
        plan("window(4)", 64, 4, "contiguous", "local")


def test_halo_is_for_windows_over_contiguous_shards() -> None:
    with pytest.raises(
        OptionError, match=r"strategy 'halo' cannot do window.*contiguous shards.* the layout is zigzag"
    ):
        plan("window(4)", 64, 4, "zigzag", "halo")
    with pytest.raises(OptionError, match="a query sees keys near its place, and 'causal' is none"):
        plan("causal", 64, 4, "contiguous", "halo")


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("pattern", "layout"), [("full", "contiguous"), ("full", "zigzag"), ("causal", "zigzag")])
def test_a_ring_buffers_two_shards_whatever_p_is(pattern: str, layout: str, ranks: int) -> None:
    exchange = plan(pattern, 24 * ranks, ranks, layout, "ring")
    peaks = [prove(exchange, rank) for rank in range(ranks)]
    # Of two ranks under a causal zigzag, one keeps its tail and the other has no use for that tail.
    assert max(forward.keys for forward, _ in peaks) == (36 if (pattern, ranks) == ("causal", 2) else 48)
    if ranks > 2:  # the bounds of the proof are reached: a plan that holds one row more is refused
        most = [max(map(max, side)) for side in zip(*peaks, strict=True)]
        assert most == [Ring().most_rows(24, backward) for backward in (False, True)] == [48, 72]


def test_both_directions_of_a_two_way_ring_are_buffered_at_once() -> None:
    for backward in (False, True):
        assert Ring(two_way=True).most_rows(24, backward) == 2 * Ring().most_rows(24, backward)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_causal_zigzag_ring_has_equal_work_in_every_step(ranks: int) -> None:
    exchange = plan("causal", 40 * ranks, ranks, "zigzag", "ring")

    def pairs(step: Step) -> int:
        return sum(exchange.pattern.pairs(block.queries, block.keys) for block in step.blocks)

    later = {pairs(step) for rank in range(ranks) for step in exchange.forward(rank)[1:]}
    assert later <= {2 * 20 * 20}


@pytest.mark.parametrize("strategy", ["ring", "ring2"])
def test_a_ring_speaks_to_neighbours_only(strategy: str) -> None:
    exchange = plan("causal", 64, 8, "zigzag", strategy)
    ways = {
        (message.target - rank) % 8 for rank in range(8) for step in exchange.forward(rank) for message in step.sends
    }
    assert ways == ({1} if strategy == "ring" else {1, 7})


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layouts", [("contiguous", "contiguous"), ("zigzag", "zigzag"), ("contiguous", "zigzag")])
@pytest.mark.parametrize("kv_length", [67, 40, 120])
def test_causal_plans_need_no_mask(ranks: int, layouts: tuple[str, str], kv_length: int) -> None:
    exchange = exchange_of(ShardedPattern("causal", 67, kv_length, ranks, *layouts), "ring")
    kinds = {block.kind for rank in range(ranks) for step in exchange.forward(rank) for block in step.blocks}
    assert kinds <= {Kind.FULL, Kind.CAUSAL}


@pytest.mark.parametrize("strategy", ["ring", "ring2", "gather"])
def test_home_is_first_forward_and_last_backward(strategy: str) -> None:
    """So that the first keys and the last gradients travel under it."""
    exchange = plan("causal", 64, 4, "zigzag", strategy)
    for rank in range(4):
        assert exchange.forward(rank)[0].blocks == exchange.home_blocks(rank) == exchange.backward(rank)[-1].blocks
        assert exchange.forward(rank)[0].sends and exchange.backward(rank)[-1].receives


def test_one_rank_sends_nothing_and_computes_one_tile() -> None:
    for layout in ("contiguous", "zigzag"):
        assert str(*plan("causal", 10, 1, layout, "ring").forward(0)) == "causal 0:10 x 0:10"
        assert str(*plan("causal", 10, 1, layout, "ring").backward(0)[-1:]) == "causal 0:10 x 0:10"


def test_a_plan_is_no_larger_for_a_longer_sequence() -> None:
    for pattern, layout in (("full", "contiguous"), ("causal", "zigzag"), ("window(900)", "contiguous")):
        short, long = (
            sum(len(step.blocks) for step in plan(pattern, length, 8, layout, "ring").forward(3))
            for length in (10_000, 1_000_000)
        )
        assert long <= max(short, 300)


def test_plans_are_values() -> None:
    """So that they are cached, and the ranks of one process share them."""
    named = plan("causal", 20, 4, "zigzag", "ring")
    by_hand = Exchange(Full(20, 20, causal=True), Zigzag(20, 4), Zigzag(20, 4), Ring())
    assert named == by_hand and hash(named) == hash(by_hand)
    assert named.forward(1) is by_hand.forward(1)
    assert plan("causal", 20, 4, "zigzag", "ring") is named


def test_refusals() -> None:
    with pytest.raises(OptionError, match="strategy 'star' is unknown; the strategies are 'local', 'halo', 'gather'"):
        plan("full", 8, 2, "zigzag", "star")
    with pytest.raises(PlanError, match="8 queries over 8 keys was given layouts of 8 rows over 2 ranks and 9 rows"):
        Exchange(Full(8, 8), Contiguous(8, 2), Contiguous(9, 2), Ring())
    with pytest.raises(PlanError, match="8 rows over 2 ranks and 8 rows over 4 ranks"):
        Exchange(Full(8, 8), Contiguous(8, 2), Contiguous(8, 4), Ring())
