"""What dilated attention costs on each rank, read off its plan (plan/dilated.py): bytes and pairs exactly, seconds, and
about what it holds at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ringopt.context_parallel.geometry.layouts import LAYOUTS
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.dilated import DilatedPlan, Stretch, TermPlan, dilated_plan_of
from ringopt.context_parallel.plan.exchange import Cargo
from ringopt.cost.choose import CLOSE, MOST_RANKS
from ringopt.cost.simulate import Heads
from ringopt.hardware.rates import Rates


@dataclass(frozen=True)
class DilatedCase:
    """One dilated self attention: its pattern, rows of the whole sequence, sizes, whether its backward will run, and
    how rows are to travel."""

    pattern: str
    q_length: int
    heads: Heads
    training: bool
    strategy: str

    @property
    def kv_length(self) -> int:
        return self.q_length

    def plan(self, ranks: int, layout: str) -> DilatedPlan:
        heads = (self.heads.q_heads, self.heads.kv_heads)
        return dilated_plan_of(self.pattern, self.q_length, heads, ranks, layout, self.strategy)

    def on_fewer(self, ranks: int) -> tuple[DilatedCase, int]:
        """The case and a number of ranks that can be unrolled, with as many rows on each."""
        if ranks <= MOST_RANKS:
            return self, ranks
        return replace(self, q_length=max(MOST_RANKS, self.q_length * MOST_RANKS // ranks)), MOST_RANKS


@dataclass(frozen=True)
class DilatedWay:
    """Forward or backward; entry r of the first three is that of rank r. `held`: bytes at once, at most, beside q, k
    and v (backward: beside what is saved and the gradient that comes in too)."""

    pairs: tuple[int, ...]
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    seconds: float
    exposed: float
    held: int


@lru_cache(maxsize=1024)
def dilated_way(case: DilatedCase, ranks: int, layout: str, rates: Rates, backward: bool) -> DilatedWay:
    """On a clock on which what is sent hides behind all that is computed, as far as may be."""
    plan, heads = case.plan(ranks, layout), case.heads
    pairs = tuple(plan.pairs(rank) for rank in range(ranks))
    one = replace(heads, q_heads=1)  # pairs are those of all heads
    flops = tuple(one.flops(some, backward) for some in pairs)
    sent = tuple(dilated_bytes(plan, heads, rank, backward) for rank in range(ranks))
    speed = rates.tile(heads.kernel, heads.dtype, backward, "causal" if plan.dilation.causal else "full")
    computed = [speed.seconds(some) for some in flops]
    steps = [
        rates.step_seconds(some, rates.exchange_seconds(size, (ranks - 1) if size else 0))
        for some, size in zip(computed, sent, strict=True)
    ]
    slowest = max(range(ranks), key=steps.__getitem__)
    held = max(dilated_memory(plan, heads, rank, backward) for rank in range(ranks))
    return DilatedWay(pairs, flops, sent, steps[slowest], max(0.0, steps[slowest] - computed[slowest]), held)


def dilated_bytes(plan: DilatedPlan, heads: Heads, rank: int, backward: bool) -> int:
    """That `rank` sends. Of torchscale's mixing the backward needs each term's own output, and runs the forward's
    exchange again."""
    row = heads.batch * (heads.key_dim + heads.value_dim)
    keys = plan.sent_rows(rank, Cargo.OUT, backward) * row * heads.itemsize
    if not backward:
        return keys
    again = plan.sent_rows(rank, Cargo.OUT) * row * heads.itemsize if plan.dilation.torchscale_mixing else 0
    return keys + again + plan.sent_rows(rank, Cargo.BACK, True) * row * heads.wide


def dilated_memory(plan: DilatedPlan, heads: Heads, rank: int, backward: bool) -> int:
    """Sums of all rows in the accumulator's dtype, the packed rows of every term that is exchanged, and one tile: the
    rows of a stretch of whole segments."""
    rows = count(plan.layout.ranges(rank))
    narrow = heads.itemsize < heads.wide
    if backward:
        numbers = heads.q_heads * heads.key_dim + heads.kv_heads * (heads.key_dim + heads.value_dim)
        sums = rows * heads.batch * numbers * (heads.wide + heads.itemsize * narrow)
    else:
        sums = rows * heads.batch * heads.q_heads * ((heads.value_dim + 1) * heads.wide)
        sums += rows * heads.batch * heads.q_heads * heads.value_dim * heads.itemsize * narrow
    tiles = [kept_rows(part, some) * per_row(part, heads, backward) for part in plan.terms for some in part.whole(rank)]
    packed = sum(exchanged_rows(part, rank) * per_row(part, heads, backward) for part in plan.terms)
    return int(sums + packed + max(tiles, default=0))


def kept_rows(part: TermPlan, some: Stretch) -> int:
    """The tokens that a dilated term keeps of the segments `some`."""
    return some.segments * len(range(part.term.kept.offset, some.length, part.term.kept.rate))


def exchanged_rows(part: TermPlan, rank: int) -> int:
    """Own ones and those that come."""
    if part.exchange is None:
        return 0
    own = count(part.exchange.kv_pieces(rank))
    return own + min(max(count(part.exchange.needs(rank)) - own, 0), own)


def per_row(part: TermPlan, heads: Heads, backward: bool) -> int:
    """Bytes of a kept row of a term: q, k, v and the result; backward also the gradients."""
    queries, keys = len(part.term.heads), len(part.term.kv_heads)
    numbers = queries * (heads.key_dim + heads.value_dim) + keys * (heads.key_dim + heads.value_dim)
    wide = queries * (heads.value_dim + 1)
    if backward:
        numbers += queries * heads.value_dim
        wide = queries * heads.key_dim + keys * (heads.key_dim + heads.value_dim)
    return heads.batch * (numbers * heads.itemsize + wide * heads.wide)


def dilated_layout_of(cases: list[DilatedCase], ranks: int, rates: Rates) -> str:
    """That in which the forwards take least time; of close ones the first."""
    smaller = [case.on_fewer(ranks) for case in cases]
    totals = {
        layout: sum(dilated_way(case, fewer, layout, rates, False).seconds for case, fewer in smaller)
        for layout in LAYOUTS
    }
    fastest = min(totals.values())
    return next(layout for layout, total in totals.items() if total <= fastest * (1 + CLOSE))
