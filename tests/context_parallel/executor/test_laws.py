"""The table of laws: pattern x strategy x layout x ranks, each with some heads, lengths and dtype; the output, all
gradients and every byte."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import Plan, plan_of
from ringopt.cost.message_bytes import Sizes, bytes_sent
from ringopt.distributed.traffic import Traffic, record_traffic
from ringopt.errors import OptionError
from ringopt.expr.block_sparse import text_of
from ringopt.expr.mask import Mask
from ringopt.kernels.choose import choose_kernel
from tests.context_parallel.reference import Problem, assert_near, join, problem, sdpa, shard, visible
from tests.harness.threads import ThreadMesh, run_on_threads

PATTERNS = (
    "full", "causal", "window(9)", "window(40,both)", "window(9,sinks=3)", "prefix(21)", "chunked(24)", "documents",
    "window(5,rate=3)", "window(9,both,sinks=2,rate=2)", "causal(rate=2)", "blocks",
)  # fmt: skip
STRATEGIES = ("local", "halo", "gather", "ring", "ring2", "gather_q", "ring_q", "ulysses")
RANKS = (2, 3, 4)
NODES = {"hybrid(2)": (4, 6), "hybrid(3)": (6,)}  # with their numbers of ranks: several nodes

# What each cell of the table takes in turn: all are met many times, in other company each.
HEADS = ((4, 4), (4, 2), (6, 2), (4, 1), (5, 5))
LENGTHS = ((64, 64), (67, 67), (257, 257), (67, 40), (40, 67), (5, 5), (64, 7))
DTYPES = ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2))


def run(case: Problem, plan: Plan, layout: str) -> tuple[list[Tensor], Traffic]:
    """out, dq, dk, dv in sequence order."""
    kernel, _ = choose_kernel("auto", case.q.dtype, case.q.device, case.k.shape[3], case.v.shape[3])
    exchange, heads = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
    site = Attention(exchange, Mask(), kernel, case.scale, heads=heads)

    def body(mesh: ThreadMesh) -> list[Tensor]:
        q, k, v, dout = (shard(x, layout, mesh.size, mesh.rank) for x in (case.q, case.k, case.v, case.dout))
        given = Operands(q, k, v)
        out, lse = attend(site, mesh, given)
        return [out, *attend_backward(site, mesh, dout, Saved(given, out, lse))[:3]]

    with record_traffic() as traffic:
        results = run_on_threads(plan.ranks, body)
    return [join(parts, layout) for parts in zip(*results, strict=True)], traffic


def sized(pattern: str, n: int, m: int) -> tuple[str, int]:
    """The pattern of n queries, and a number of keys that it can have: for those that list rows."""
    if pattern == "documents":
        return f"documents({','.join(map(str, sorted({0, 2, n // 3, n - 2, n})))})", n
    if pattern == "blocks":  # the first block, and two after one's own place, every third of which sees nothing
        rows, keys = -(-n // 10), -(-m // 12)
        seen = [[i % 3 > 0 and (j == 0 or 0 <= j - i * keys // rows < 2) for j in range(keys)] for i in range(rows)]
        return f"blocks(10x12;{text_of(seen)}{',both' if n > m else ''})", m
    return pattern, m


@lru_cache(maxsize=128)
def dense(pattern: str, n: int, m: int, heads: tuple[int, int], dims: tuple[int, int]) -> list[Tensor]:
    """out, dq, dk, dv in float64: the same for all strategies, layouts, ranks and dtypes."""
    return list(sdpa(problem(n, m, heads=heads, dims=dims), visible(pattern, n, m)))


@dataclass(frozen=True)
class Cell:
    """Of the table. `dims`: of keys and of values."""

    pattern: str
    strategy: str
    layout: str
    ranks: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dtype: torch.dtype
    near: float
    dims: tuple[int, int] = (8, 5)

    def holds(self) -> bool:
        """Raises AssertionError where it does not; False where the strategy refuses it, with a sentence."""
        pattern, m = sized(self.pattern, *self.lengths)
        n, p = self.lengths[0], self.ranks
        try:
            plan = plan_of(ShardedPattern(pattern, n, m, p, self.layout, self.layout), self.strategy, self.heads)
        except OptionError as refused:
            assert f"strategy {self.strategy!r} cannot do" in str(refused) and self.strategy in ("local", "halo")
            return False
        exact = problem(n, m, heads=self.heads, dims=self.dims)
        given = exact.to(self.dtype)
        found, traffic = run(given, plan, self.layout)
        for got, right in zip(found, dense(pattern, n, m, self.heads, self.dims), strict=True):
            assert_near(got, right, self.near)
        sizes = Sizes.of(given.q, given.k, given.v)
        for rank, way in product(range(p), ("forward", "backward")):
            events = traffic.of(rank).events
            sent = sum(event.bytes for event in events if event.label.startswith(way))
            assert sent == bytes_sent(plan, sizes, rank, way == "backward"), (rank, way)
        return True


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *NODES])
def test_laws(strategy: str, layout: str) -> None:
    done, ranks, first = 0, NODES.get(strategy, RANKS), 3 * [*STRATEGIES, *NODES].index(strategy)
    for number, (pattern, p) in enumerate(product(PATTERNS, ranks), start=first):
        heads, lengths, (dtype, near) = (some[number % len(some)] for some in (HEADS, LENGTHS, DTYPES))
        dims = (8, 8 if number % 2 else 5)
        done += Cell(pattern, strategy, layout, p, lengths, heads, dtype, near, dims).holds()
    least = {"local": 0, "halo": 8 if layout == "contiguous" else 0}.get(strategy, len(PATTERNS) * len(ranks))
    assert done >= least


@pytest.mark.zoo
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", [*STRATEGIES, *NODES])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_laws(pattern: str, strategy: str, layout: str) -> None:
    """The full product."""
    for p, heads, n, (dtype, near) in product(NODES.get(strategy, RANKS), HEADS[1:4], (64, 67, 257), DTYPES):
        Cell(pattern, strategy, layout, p, (n, n), heads, dtype, near).holds()


def test_local_where_no_rows_are_missing() -> None:
    case = problem(64)
    plan = plan_of(ShardedPattern.of_self_attention("chunked(16)", 64, 4, "contiguous"), "local", (4, 2))
    found, traffic = run(case, plan, "contiguous")
    for got, right in zip(found, sdpa(case, visible("chunked(16)", 64, 64)), strict=True):
        assert_near(got, right, 1e-12)
    assert traffic.bytes_sent == 0
