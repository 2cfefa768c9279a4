"""What an attention holds at once: predictions from its plan, beside what the allocator counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ringopt.context_parallel.plan.strategies import MERGE
from ringopt.cost.choose import Case
from ringopt.cost.memory import made_bytes, memory_of, most_memory
from ringopt.cost.simulate import Heads
from ringopt.distributed.mesh import PretendedMesh, register
from ringopt.tools.benchmarks.lab.names import FEW, STRATEGIES
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.tables.memory import largest
from ringopt.tools.benchmarks.workers import memory as memory_ranks
from ringopt.tools.benchmarks.workers.memory import Alone, Planned, planned, row_of

WIDE = Heads(1, 4, 4, 16, 16, 4, 4, "float32", "flash_cpu")
GROUPED = Heads(2, 4, 2, 16, 16, 4, 4, "float32", "flash_cpu")
HALF = Heads(1, 4, 4, 64, 64, 2, 4, "bfloat16", "flash_cpu")
PATTERNS = (("full", "contiguous"), ("causal", "zigzag"), ("window(40)", "contiguous"))


def alone(rank: int, p: int, length: int, heads: Heads, patterns: Sequence[tuple[str, str]] = PATTERNS) -> list[Row]:
    """What one rank holds. They run one at a time: for what one holds, the others need not be there."""
    mesh = Alone(PretendedMesh(rank, p))
    register(mesh)
    return [row_of(mesh, each) for each in planned(p, length, heads, patterns)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("p", "heads"), [(2, WIDE), (3, WIDE), (4, GROUPED), (2, HALF)])
def test_predictions_are_within_15_percent(p: int, heads: Heads) -> None:
    """Of the rank that holds most."""
    found = [alone(rank, p, 257, heads) for rank in range(p)]
    rows = [largest(list(ranks)) for ranks in zip(*found, strict=True)]
    assert {row["strategy"] for row in rows} == set(STRATEGIES)
    for row, way in itertools.product(rows, ("forward", "training")):
        assert row[f"{way} predicted"] == pytest.approx(row[way], rel=0.15), (row["pattern"], row["strategy"], way)


class Near(Alone):
    """A rank whose others read its memory."""

    gathers_in_place = True


@pytest.mark.parametrize("p", [2, 4])
def test_ranks_that_read_each_others_memory_need_no_buffer_to_gather(p: int) -> None:
    """The results of a few queries that every rank has are gathered to be merged."""
    case = Case("full", FEW, 257, WIDE, True, whole="queries")
    few = Planned(case, MERGE, case.plan(p, "contiguous", MERGE))
    meshes = [kind(PretendedMesh(0, p)) for kind in (Near, Alone)]
    for mesh in meshes:
        register(mesh)
    near, far = (row_of(mesh, few) for mesh in meshes)
    for row in (near, far):
        assert row["forward predicted"] == pytest.approx(row["forward"], rel=0.15)
    assert near["forward"] < far["forward"]


@pytest.mark.zoo
def test_over_nodes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ranks, "STRATEGIES", ("hybrid(2)",))
    for p, heads in ((4, WIDE), (6, GROUPED), (4, HALF)):
        found = [alone(rank, p, 257, heads) for rank in range(p)]
        for row in (largest(list(ranks)) for ranks in zip(*found, strict=True)):
            for way in ("forward", "training"):
                assert row[f"{way} predicted"] == pytest.approx(row[way], rel=0.15), (row["pattern"], p, way)


def test_large_exchanges_take_turns_in_what_they_hold_too() -> None:
    """4 heads of 2 MiB a shard are four exchanges, each with a quarter of the tiles beside the sums of all."""
    heads = Heads(1, 4, 4, 64, 64, 4, 4, "float32", "flash_cpu")
    for row in alone(1, 2, 2048, heads, [("full", "contiguous")]):
        for way in ("forward", "training"):
            assert row[f"{way} predicted"] == pytest.approx(row[way], rel=0.15), (row["strategy"], way)


def test_the_ring_falls_as_1_over_p() -> None:
    heads = Heads(1, 8, 8, 64, 64, 2, 4, "bfloat16", "flash")
    held = {
        p: most_memory(Case("full", 2**15, 2**15, heads, True).plan(p, "contiguous", "ring"), heads) for p in (2, 4, 8)
    }
    for p in (4, 8):
        assert held[p].forward * p == pytest.approx(held[2].forward * 2, rel=0.1)
        # Of two ranks none passes on what others summed.
        assert held[p].training * p == pytest.approx(held[2].training * 2, rel=0.4)


@pytest.mark.parametrize(
    ("dtype", "itemsize", "beside"), [("float32", 4, 512 * (8 + 1) * 4), ("bfloat16", 2, 4096 * 8 * 2)]
)
def test_only_sums_of_more_bits_are_copied_into_results(dtype: str, itemsize: int, beside: int) -> None:
    """8 chunks of 512 rows on one rank, 8 numbers a head. Beside the sums of 4096 rows in 32 bits stands the result of
    one chunk, output and log-sum-exp; in the end, of 16 bits, the whole output."""
    heads = Heads(1, 1, 1, 8, 8, itemsize, 4, dtype, "flash")
    plan = Case("chunked(512)", 4096, 4096, heads, False).ring(1, "contiguous")
    assert memory_of(plan, heads, 0).forward == 4096 * (8 + 1) * 4 + beside


def test_keys_that_are_made_where_they_are_used_are_there_a_piece_at_a_time() -> None:
    """Of 8 rows on 2 ranks each piece has 4, of 4 heads with 16 numbers a key and 16 a value."""
    plan = Case("full", 8, 8, WIDE, False).ring(2, "contiguous")
    assert made_bytes(plan, replace(WIDE, latent=3), 0) == 4 * (4 * (16 + 16) * 4)
    assert made_bytes(plan, WIDE, 0) == 0
