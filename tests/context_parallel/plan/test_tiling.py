"""Blocks that a pattern cuts through, computed in strips: how long these are, that they hold all that is seen, and that
equal masks are made once."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.tiles import TileScores
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.rows import within
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Block
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.tiling import computed, joined, pieces, queries_at_once, strip_of
from ringopt.expr.mask import Mask
from ringopt.hardware.devices import limits_of
from tests.context_parallel.reference import visible


@pytest.mark.parametrize(
    ("pattern", "device", "queries"),
    [
        ("window(512)", "cpu", 128),  # 639 keys a query; strips of 64 would save a tenth of them
        ("window(512)", "cuda", 512),
        ("window(512,both)", "cpu", 256),
        ("window(16)", "cpu", 64),
        ("window(512,sinks=4)", "cpu", 128),
    ],
)
def test_strips_are_as_short_as_pays(pattern: str, device: str, queries: int) -> None:
    whole, least = range(2048, 2560), limits_of(device).least
    assert queries_at_once(pattern_of(pattern, 8192, 8192), whole, range(1024, 2560), least) == queries


@pytest.mark.parametrize(
    "pattern",
    ["window(40)", "window(40,both)", "window(40,sinks=3)", "window(9,rate=3)", "chunked(70)", "documents(0,90,257)"],
)
def test_they_hold_all_that_is_seen(pattern: str) -> None:
    n, rows = 257, range(30, 250)
    who, block = pattern_of(pattern, n, n), Block(rows, range(2, 257), Kind.PARTIAL)
    seen, found = visible(pattern, n, n), torch.zeros(n, n, dtype=torch.bool)
    for piece in pieces(who, block, "flash_cpu"):
        found[piece.queries.start : piece.queries.stop, piece.keys.start : piece.keys.stop] = True
    assert not (seen[30:250, 2:] & ~found[30:250, 2:]).any()
    assert int(found.sum()) <= computed(who, rows, block.keys, len(rows))


def test_strips_of_a_tile_are_what_a_kernel_takes_at_once() -> None:
    """On cores an eighth of the queries, 1024 at least, up to the next multiple of 256; a GPU takes all at once."""
    assert [strip_of(queries) for queries in (100, 8192, 9000, 16384, 20000)] == [1024, 1024, 1280, 2048, 2560]
    assert [strip_of(queries, "cuda") for queries in (0, 20000)] == [1, 20000]


def test_equal_masks_are_made_once() -> None:
    """Of the strips of a window. The first queries see all that is before them, and need none."""
    plan = exchange_of(ShardedPattern.of_self_attention("window(512)", 2048, 1, "contiguous"), "ring")
    scores = TileScores(plan.pattern, Mask(), [], MaskFacts([]), 1, range(2), torch.float32, torch.device("cpu"))
    tiles = [tile for block in plan.home_blocks(0) for tile in scores.tiles(block)]
    strips = [tile for tile in tiles if not tile.causal]
    assert {(len(tile.queries), len(tile.keys)) for tile in strips} == {(128, 639)}
    assert len(strips) == 12 and len({id(tile.mask) for tile in strips}) == 1


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("pattern", ["window(40)", "window(70,both)", "window(1)", "causal", "window(40,sinks=3)"])
def test_strips_of_a_band_are_joined(pattern: str, layout: str) -> None:
    """Of all ranks and steps: every pair once, in one block for each piece of keys or so."""
    n, ranks = 2100, 2
    plan = exchange_of(ShardedPattern.of_self_attention(pattern, n, ranks, layout), "ring")
    seen, found, fewer = visible(pattern, n, n), torch.zeros(n, n, dtype=torch.uint8), 0
    for rank in range(ranks):
        steps = plan.forward(rank)
        for blocks in (step.blocks for step in steps):
            whole = joined(plan.pattern, blocks, plan.q_pieces(rank))
            fewer += len(blocks) - len(whole)
            for block in whole:
                place = (slice(block.queries.start, block.queries.stop), slice(block.keys.start, block.keys.stop))
                found[place] += seen[place]
                assert block.kind is plan.pattern.kind(block.queries, block.keys)
                assert any(within(block.queries, own) for own in plan.q_layout.ranges(rank))
    assert torch.equal(found, seen.byte())
    assert (fewer > 0) == (pattern in ("window(40)", "window(70,both)"))


def test_strips_are_joined_within_one_piece_of_a_rank() -> None:
    """Queries 0 to 4 and 8 to 12 are the rank's, 4 to 8 are not, so its rows are no one tile."""
    who = pattern_of("window(3)", 12, 12)

    def strip(first: int) -> Block:
        return Block(range(first, first + 2), range(max(0, first - 2), first + 2), Kind.PARTIAL)

    strips = tuple(map(strip, (0, 2, 8, 10)))
    found = joined(who, strips, (range(4), range(8, 12)))
    assert [(block.queries, block.keys) for block in found] == [(range(4), range(4)), (range(8, 12), range(6, 12))]
    apart = joined(who, strips[:2], (range(2), range(2, 4)))
    assert apart == strips[:2], "of two pieces"
