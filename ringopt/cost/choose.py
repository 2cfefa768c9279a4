"""Which strategy moves the rows of an attention, and in which layout: the fastest by prediction, within a memory bound.

Asked with facts that all ranks share (lengths, sizes, agreed rates), so that all ranks answer alike. A decision between
predictions as close as CLOSE goes to keys that travel before queries, whose results nothing hides in the end, then to
what sends less, then to what is named first in LEAN.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from ringopt.context_parallel.geometry.layouts import LAYOUTS, layouts_of, text_of
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.plan_of import NAMES, Plan, exchange_of, hybrid, plan_of
from ringopt.context_parallel.plan.strategies import MERGE, QUERIES_MOVE
from ringopt.cost.memory import most_memory
from ringopt.cost.simulate import Heads, pairs_of, simulate
from ringopt.errors import OptionError
from ringopt.expr.mask import Mask
from ringopt.hardware.rates import Rates, with_link
from ringopt.output.drawn import Prediction
from ringopt.report import bytes_text

# Times within this part of each other are equal, as far as a prediction can tell.
CLOSE = 0.03

# Among equal ones queries travel in place of keys where that is so many times less.
FAR_LESS = 2

# From what holds least to what holds most.
LEAN = ("local", "halo", "ring", "gather", "ring2")

# What an attention may hold: what the ring does and as many shards of keys and values more, or a part of the device.
SHARDS = 1

# Of more ranks the plan is not unrolled: strategies are compared as they would be on so many, each with as many rows.
MOST_RANKS = 32


@dataclass(frozen=True)
class Case:
    """One attention: who sees whom, rows of the whole sequences, sizes, whether its backward will run, the text of its
    mask, and the side ("queries", "keys") that every rank has whole, if one."""

    pattern: str
    q_length: int
    kv_length: int
    heads: Heads
    training: bool
    mask: str = ""
    whole: str = ""

    def plan(self, ranks: int, layout: str, strategy: str) -> Plan:
        """`layout` is that of queries and keys, or of each (layouts.layouts_of). Raises OptionError where `strategy`
        cannot do it."""
        sides = zip(("queries", "keys"), layouts_of(layout), strict=True)
        queries, keys = ("replicated" if side == self.whole else its for side, its in sides)
        sharded = ShardedPattern(self.pattern, self.q_length, self.kv_length, ranks, queries, keys)
        return plan_of(sharded, strategy, (self.heads.q_heads, self.heads.kv_heads), Mask.parse(self.mask))

    def plain(self) -> Case:
        """The same with K and V that travel themselves."""
        return replace(self, heads=self.heads.plain())

    def ring(self, ranks: int, layout: str) -> Exchange:
        """The ring can do everything."""
        queries, keys = layouts_of(layout)
        return exchange_of(ShardedPattern(self.pattern, self.q_length, self.kv_length, ranks, queries, keys), "ring")

    @property
    def lists_rows(self) -> bool:
        """Whether the pattern is told by numbers of rows, and is none at another length."""
        return self.pattern.startswith(("documents", "blocks"))

    def on_fewer(self, ranks: int) -> tuple[Case, int]:
        """The case and a number of ranks that can be unrolled: at most MOST_RANKS, with as many rows on each; of a side
        that every rank has whole, all. A pattern that lists rows has no other length."""
        if ranks <= MOST_RANKS or self.lists_rows:
            return self, ranks
        sides = (("queries", self.q_length), ("keys", self.kv_length))
        q_length, kv_length = (
            n if side == self.whole else max(MOST_RANKS, n * MOST_RANKS // ranks) for side, n in sides
        )
        return replace(self, q_length=q_length, kv_length=kv_length), MOST_RANKS


@dataclass(frozen=True)
class Estimate:
    """Of one strategy: seconds until the last rank is done, and bytes of the rank that sends most; in training of both
    directions."""

    strategy: str
    seconds: float
    bytes: int
    plan: Plan = field(repr=False)
    case: Case = field(repr=False)

    @cached_property
    def held(self) -> int:
        """The most bytes that a rank holds at once beside its own q, k, v. Counted when asked: few are."""
        memory = most_memory(self.plan, self.case.heads)
        return memory.training if self.case.training else memory.forward

    def __str__(self) -> str:
        return f"{self.strategy}{' of latents' if self.latent else ''} {duration(self.seconds)}"

    @property
    def carries(self) -> bool:
        """Whether K and V travel to where they are used, and nothing else."""
        return keys_travel(self.plan)

    @property
    def latent(self) -> bool:
        """Whether what K and V are made of travels in their place."""
        return self.case.heads.latent > 0


@dataclass(frozen=True)
class Choice:
    """`estimates`: of all that were compared, the chosen one first; `bound`: the bytes that one may hold."""

    strategy: str
    estimates: tuple[Estimate, ...]
    bound: int
    source: str

    @property
    def reason(self) -> str:
        """One sentence with the numbers."""
        best, *others = self.estimates
        text = "; ".join(
            f"{one}, {bytes_text(one.bytes)} sent"
            + (f", but holds {bytes_text(one.held)}" if one.held > self.bound else "")
            for one in others
        )
        rest = f" (others: {text})" if text else ""
        return f"strategy {best}, {bytes_text(best.bytes)} sent, predicted{rest}; {self.source}"

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The same as numbers."""
        return tuple(
            Prediction(one.strategy, one.seconds, one.bytes, one.held, one.held <= self.bound) for one in self.estimates
        )

    @property
    def seconds(self) -> float:
        return self.estimates[0].seconds


def estimate(case: Case, ranks: int, layout: str, strategy: str, rates: Rates) -> Estimate:
    """Raises OptionError where the strategy cannot do it, on as many ranks as were asked for. Where K and V may be made
    where they are used, of the faster form; of close ones, of that which sends less."""
    plan = case.plan(ranks, layout, strategy)
    fewer, ranks = case.on_fewer(ranks)
    plain = unrolled_estimate(fewer.plain(), ranks, layout, strategy, rates)
    if not case.heads.latent or not keys_travel(plan):
        return plain
    latent = unrolled_estimate(fewer, ranks, layout, strategy, rates)
    pays = latent.bytes < plain.bytes and making_pays(fewer, ranks, layout, strategy, with_link(rates))
    return latent if pays else plain


def making_pays(case: Case, ranks: int, layout: str, strategy: str, rates: Rates) -> bool:
    """Whether it takes no longer to make K and V where they are used, of what travels in their place."""
    latent, plain = (unrolled_estimate(one, ranks, layout, strategy, rates) for one in (case, case.plain()))
    rows = -(-case.kv_length // ranks)  # of which K and V are made in any form
    made = sum(case.heads.making(rows, backward) for backward in (False, True)[: 1 + case.training])
    return latent.seconds <= (plain.seconds + made / rates.default.rate) * (1 + CLOSE)


def keys_travel(plan: Plan) -> bool:
    """Whether K and V travel to where they are used, and nothing else."""
    return isinstance(plan, Exchange) and not plan.queries_move


@lru_cache(maxsize=4096)
def unrolled_estimate(case: Case, ranks: int, layout: str, strategy: str, rates: Rates) -> Estimate:
    """On ranks so few that all are unrolled: the same for many a length and number of ranks that are asked for."""
    plan = case.plan(ranks, layout, strategy)
    ways = [simulate(plan, case.heads, rates, backward) for backward in (False, True)[: 1 + case.training]]
    sent = max(map(sum, zip(*(way.bytes for way in ways), strict=True)))
    return Estimate(strategy, sum(way.seconds for way in ways), sent, plan, case)


@lru_cache(maxsize=4096)
def choose_strategy(case: Case, ranks: int, layout: str, rates: Rates, fixed: bool = True) -> Choice:
    """The strategy of one attention in `layout`. The ring can do all, so there always is one. Where lengths or ranks
    are not `fixed`, none that holds for those at hand alone: chunks that are cut nowhere here may be cut elsewhere."""
    found = []
    # Between nodes with one link for all, heads are as well traded by all ranks.
    over_nodes = [hybrid(rates.node)] if rates.tiers(ranks) else []
    for strategy in sorted([*NAMES, *over_nodes], key=order):
        if strategy == MERGE or (strategy == "local" and not fixed):
            continue  # for queries that are not spread; and gathering sends as little where nothing is missing
        try:
            found.append(estimate(case, ranks, layout, strategy, rates))
        except OptionError:
            continue  # it says itself that it cannot do this pattern in this layout
    ring = next(one for one in found if one.strategy == "ring")
    bound = allowed(case, ranks, rates, ring)
    by_time = sorted(found, key=lambda one: one.seconds)
    fastest = next(one.seconds for one in by_time if one.held <= bound)
    close = [one for one in found if one.seconds <= fastest * (1 + CLOSE)]
    # Queries go where they are far less: their results come back after the last product, beside nothing.
    close.sort(key=lambda one: (one.bytes * (FAR_LESS if one.strategy in QUERIES_MOVE else 1), order(one.strategy)))
    best = next(one for one in close if one.held <= bound)
    others = [one for one in found if one is not best]
    return Choice(best.strategy, (best, *others), bound, rates.source)


def allowed(case: Case, ranks: int, rates: Rates, ring: Estimate) -> int:
    """Bytes that may be held: of the ring and SHARDS shards more, or a part of the device."""
    shards = SHARDS * -(-case.kv_length // ranks) * case.heads.row()
    return max(ring.held + shards, rates.memory // rates.part if ranks <= MOST_RANKS else 0)


def order(strategy: str) -> tuple[int, str]:
    """The sort key of strategies that tie: the leanest first."""
    return (LEAN.index(strategy) if strategy in LEAN else len(LEAN), strategy)


def choose_layout(
    cases: Sequence[Case], ranks: int, strategy: str, layouts: Sequence[str], rates: Rates
) -> tuple[str, str]:
    """Of `layouts` the one in which all `cases` together take least time, and the reason. Of close ones that whose
    busiest ranks have least work, then the first.

    `strategy` is that of the options; where it can do all of them in no layout, the first: what cannot be done is told
    when it is planned.
    """
    totals: dict[str, float] = {}
    for layout in layouts:
        try:
            totals[layout] = sum(estimated(case, ranks, layout, strategy, rates).seconds for case in cases)
        except OptionError:
            continue  # not in this layout
    if not totals:
        return layouts[0], ""
    fastest = min(totals.values())
    close = [layout for layout, total in totals.items() if total <= fastest * (1 + CLOSE)]
    best = min(close, key=lambda layout: sum(busiest(case, ranks, layout) for case in cases))
    text = " and ".join(f"{duration(total)} {layout}" for layout, total in totals.items())
    return best, f"layout {best}: all sites take {text}, predicted" if len(totals) > 1 else ""


Sited = tuple[Case, Hashable, Hashable]  # an attention, and the names of its axes of queries and of keys


def choose_layouts(
    one: str, sites: Sequence[Sited], enough: Mapping[Hashable, bool], ranks: int, strategy: str, rates: Rates
) -> tuple[dict[Hashable, str], str]:
    """The layout of each axis, and the reason where not all have layout `one`. Beginning with that, each takes another
    where all `sites` together are predicted to be faster for it, or as fast, better balanced or with less to send.
    `enough`: the axes, and whether they have rows enough for zigzag."""
    chosen = dict.fromkeys(enough, one)
    rows = {axis: n for case, *axes in sites for axis, n in zip(axes, (case.q_length, case.kv_length), strict=True)}
    why = ""

    def cost(chosen: Mapping[Hashable, str]) -> tuple[float, tuple[int, int]]:
        """Seconds, and what is less where they are close: pairs of the busiest ranks, then bytes."""
        cases = [(case, text_of(chosen[queries], chosen[keys])) for case, queries, keys in sites]
        try:
            found = [estimated(case, ranks, layout, strategy, rates) for case, layout in cases]
        except OptionError:
            return math.inf, (0, 0)  # the strategy that is asked for is none in these
        pairs = sum(busiest(case, ranks, layout) for case, layout in cases)
        return sum(each.seconds for each in found), (pairs, sum(each.bytes for each in found))

    for axis in enough:
        for layout in LAYOUTS:
            if layout == "zigzag" and not enough[axis]:
                continue
            other = chosen | {axis: layout}
            (before, more), (after, less) = cost(chosen), cost(other)
            if after < before * (1 - CLOSE) or (after <= before * (1 + CLOSE) and less < more):
                chosen = other
                why = (
                    f"layout {layout} of the {rows[axis]} rows: all sites take {duration(after)} with it and "
                    f"{duration(before)} without, predicted"
                )
    return chosen, why


def busiest(case: Case, ranks: int, layout: str) -> int:
    """Pairs of query and key of the rank that has most."""
    fewer, ranks = case.on_fewer(ranks)
    return max(pairs_of(fewer.ring(ranks, layout), rank) for rank in range(ranks))


def estimated(case: Case, ranks: int, layout: str, strategy: str, rates: Rates) -> Estimate:
    """Of `strategy`, or of the one that "auto" takes."""
    if strategy == "auto":
        return choose_strategy(case, ranks, layout, rates).estimates[0]
    return estimate(case, ranks, layout, strategy, rates)


def duration(seconds: float) -> str:
    """Three digits, in s, ms or us."""
    unit, factor = next(((u, f) for u, f in (("s", 1.0), ("ms", 1e3)) if seconds * f >= 1), ("us", 1e6))
    number = seconds * factor  # from 999.5 on, three digits would be written as 1e+03
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
