"""The order of messages: what the executor posts is what the proof believes it to be, no plan hangs under NCCL, and
planted orders that would are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved, kv_sizes
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan import concurrency
from ringopt.context_parallel.plan.concurrency import KVSizes, prove_plan, sub_exchanges
from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Message
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.context_parallel.plan.posting_order import Batch, batches, check_order
from ringopt.distributed.mesh import PretendedMesh, Transfer
from ringopt.errors import OptionError, PlanError
from ringopt.expr.mask import Mask
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from tests.context_parallel.drawing import exchanges
from tests.harness.limits import set_limits

HEADS, DIM = 3, 4


class NoKernel(Kernel):
    """Computes nothing."""

    name = "flash"

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> None: ...

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(tile.q), tile.q.new_zeros(tile.q.shape[:3])

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros_like(tile.q), torch.zeros_like(tile.k), torch.zeros_like(tile.v)


class Noting(PretendedMesh):
    """Notes what is posted, in order: whom a batch sends to and receives from, and how much."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.posted: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        both = (sorted((peer, buffer.numel()) for peer, buffer in way) for way in (sends, receives))
        self.posted.append(tuple(both))  # type: ignore[arg-type]
        return []


def run_in_order(posted: Sequence[Sequence[Batch]]) -> None:
    """A message moves while the batches of both of its ends are the first that are left of their ranks. Raises
    PlanError where none moves and some are left."""
    left = [list(opened(batches)) for batches in posted]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            if queue:
                first = queue[0]
                met = {(kind, one) for kind, one in first if is_first(left, other_end(one, rank), (kind, one))}
                for kind, one in met:
                    first.discard((kind, one))
                    left[other_end(one, rank)][0].discard((kind, one))
                if not first:
                    queue.pop(0)
                moved = moved or bool(met) or not first
    stuck = {rank: sorted(str(one) for _, one in queue[0]) for rank, queue in enumerate(left) if queue}
    if stuck:
        raise PlanError(f"all of these ranks wait, each behind its first batch: {stuck}")


def opened(posted: Sequence[Batch]) -> Iterator[set[tuple[int, Message]]]:
    return ({(batch.turn[1], one) for one in batch.messages} for batch in posted)


def other_end(message: Message, rank: int) -> int:
    return message.target if message.source == rank else message.source


def is_first(left: list[list[set[tuple[int, Message]]]], peer: int, end: tuple[int, Message]) -> bool:
    return bool(left[peer]) and end in left[peer][0]


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even small attentions are cut into several exchanges, of heads and of rows."""
    set_limits(monkeypatch, message=1)
    monkeypatch.setattr(concurrency, "ROWS", 4)


def elements(message: Message, heads: int, exchange: Exchange, backward: bool) -> int:
    """Of the buffer. Queries travel alone, or with their gradient and results and the bits of a float64."""
    if not exchange.queries_move:
        width = 2 * DIM
    elif message.cargo is Cargo.BACK:
        width = DIM if backward else DIM + 1
    else:
        width = 3 * DIM + 1 if backward else DIM
    return heads * count(message.rows) * width


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["ring", "ring2", "gather", "halo", "ring_q", "gather_q"])
@pytest.mark.parametrize("pattern", ["full", "causal", "window(9)"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_executor_posts_in_this_order(p: int, pattern: str, strategy: str, cut_small: None) -> None:
    n = 16 * p + 3
    for layout in ("contiguous", "zigzag"):
        try:
            exchange = exchange_of(ShardedPattern(pattern, n, n, p, layout, layout), strategy)
        except OptionError:
            assert strategy == "halo" and (pattern, layout) != ("window(9)", "contiguous")
            continue
        site = Attention(exchange, Mask(), NoKernel(), 1.0)
        for rank in range(p):
            rows, mesh = count(layout_of(layout, n, p).ranges(rank)), Noting(rank, p)
            q = k = v = torch.zeros(1, HEADS, rows, DIM, dtype=torch.float64)
            given = Operands(q, k, v)
            if exchange.queries_move:
                cut, heads = [exchange], [HEADS]
            else:
                subs = sub_exchanges(exchange, kv_sizes(k, v, Mask()))
                cut, heads = [sub.exchange for sub in subs], [len(sub.heads) for sub in subs]
            out, lse = attend(site, mesh, given)
            for backward in (False, True):
                if backward:
                    mesh.posted.clear()
                    attend_backward(site, mesh, out, Saved(given, out, lse))
                believed = []
                for batch in batches(cut, rank, backward):
                    each = heads[batch.turn[1]]
                    ends = [(one, elements(one, each, exchange, backward)) for one in batch.messages]
                    sends = sorted((one.target, size) for one, size in ends if one.source == rank)
                    receives = sorted((one.source, size) for one, size in ends if one.target == rank)
                    believed.append((sends, receives))
                assert mesh.posted == believed


def test_no_plan_hangs(cut_small: None) -> None:
    """Pattern, layouts, strategy, ranks to 16: the local proof, and NCCL's order for the whole world."""
    for number, exchange in enumerate(exchanges(150, most_rows=120)):
        parts = exchange.parts(1 + number % 3) if not exchange.queries_move else (exchange,)
        cut = tuple(part for part in parts for _ in range(1 + number % 2))  # heads, too
        for backward in (False, True):
            for rank in range(exchange.ranks):
                check_order(rank, partial(batches, cut, backward=backward))
            run_in_order([batches(cut, rank, backward) for rank in range(exchange.ranks)])


# ---- planted ---------------------------------------------------------------------------------------------------------
def lists(strategy: str = "ring", backward: bool = True) -> list[list[Batch]]:
    exchange = exchange_of(ShardedPattern("causal", 64, 64, 4, "zigzag", "zigzag"), strategy)
    return [list(batches(exchange.parts(2), rank, backward)) for rank in range(4)]


def refused(posted: list[list[Batch]]) -> list[str]:
    found = []
    for rank in range(len(posted)):
        try:
            check_order(rank, posted.__getitem__)
        except PlanError as error:
            found.append(str(error))
    return found


def test_two_ranks_that_post_in_another_order_hang_and_are_refused() -> None:
    """The last batch of one is the first of the other."""
    posted = lists()
    assert not refused(posted)
    run_in_order(posted)
    posted[1].insert(0, posted[1].pop())
    assert any("rank 1 posts turn" in sentence for sentence in refused(posted))
    with pytest.raises(PlanError, match="all of these ranks wait, each behind its first batch"):
        run_in_order(posted)


def test_every_order_that_hangs_is_refused() -> None:
    """Any two neighbouring batches of any rank, swapped: some do no harm, and all that hang are refused."""
    hung = 0
    for rank, place in product(range(4), range(len(lists()[0]) - 1)):
        posted = lists()
        own = posted[rank]
        if place + 1 >= len(own):
            continue
        own[place], own[place + 1] = own[place + 1], own[place]
        try:
            run_in_order(posted)
        except PlanError:
            hung += 1
            assert refused(posted)
    assert hung > 4


def test_batches_that_are_joined_on_one_rank_only_hang_and_are_refused() -> None:
    """Rows and sums in one batch here, in two there: the circle is of three ranks."""
    hung = 0
    for rank in range(4):
        posted = lists()
        for place in range(len(posted[rank]) - 1):
            first, second = posted[rank][place : place + 2]
            joined = [*posted[rank][:place], replace(first, messages=(*first.messages, *second.messages))]
            trial = [*posted[:rank], [*joined, *posted[rank][place + 2 :]], *posted[rank + 1 :]]
            assert refused(trial)
            try:
                run_in_order(trial)
            except PlanError:
                hung += 1
    assert hung


def test_a_plan_that_could_hang_is_refused_before_its_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = exchange_of(ShardedPattern("causal", 80, 80, 4, "zigzag", "zigzag"), "ring")
    in_order = batches

    def swapped(cut: Sequence[Exchange], rank: int, backward: bool) -> tuple[Batch, ...]:
        found = in_order(cut, rank, backward)
        return found if rank else (*found[1:], found[0])

    monkeypatch.setattr(concurrency, "batches", swapped)
    concurrency._prove_order.cache_clear()
    with pytest.raises(PlanError, match="order of messages: rank 0 posts turn"):
        prove_plan(plan, KVSizes(4, 64), 0)
    concurrency._prove_order.cache_clear()
