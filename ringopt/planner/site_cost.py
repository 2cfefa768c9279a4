"""What one attention of a plan costs at one length and number of ranks: by its unrolled plan on up to 32 ranks, by the
closed formulas beyond, or where there are none as on 32 ranks with as many rows each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ringopt.context_parallel.geometry.layouts import LAYOUTS, text_of
from ringopt.context_parallel.geometry.parse import WINDOW
from ringopt.context_parallel.plan.concurrency import exchanges_of
from ringopt.context_parallel.plan.plan_of import trading
from ringopt.context_parallel.plan.tiling import least_of, strip_of
from ringopt.cost import volume
from ringopt.cost.choose import MOST_RANKS, Case, choose_layout, choose_layouts, choose_strategy, estimate
from ringopt.cost.dilated import DilatedCase, dilated_layout_of, dilated_way
from ringopt.cost.formulas import F, F_b, L, Q, T, U, V, W, Z, formulas_of, o, o_b, s
from ringopt.cost.memory import merged, most_memory
from ringopt.cost.message_bytes import bytes_between
from ringopt.cost.simulate import simulate
from ringopt.errors import OptionError
from ringopt.hardware.rates import Rates
from ringopt.planner.trace_model import PlannedSite


@dataclass(frozen=True)
class SitePoint:
    """Predictions for one attention (all `times` of it) at one size, forward and backward together. `between`: of the
    bytes those that leave the node, of the rank that sends most of them. `memory`, `memory_backward`: bytes that one of
    them holds at once, as cost/memory.py counts them."""

    module: str
    strategy: str
    layout: str
    pairs: int
    flops: float
    bytes: int
    between: int
    seconds: float
    exposed: float
    memory: int
    memory_backward: int
    exact: bool
    by_rank: tuple[int, ...] = ()  # bytes, where ranks are few enough to be unrolled


# ---- what is asked for ----------------------------------------------------------------------------------------------
def at_length(case: Case | DilatedCase, length: int, of: int, ranks: int) -> Case | DilatedCase:
    """With sequences in proportion, but for a side that is so short that each rank has it whole."""
    if isinstance(case, DilatedCase):
        return replace(case, q_length=max(1, case.q_length * length // of))
    queries, keys = (max(1, n * length // of) for n in (case.q_length, case.kv_length))
    if case.whole:
        queries, keys = (case.q_length, keys) if case.whole == "queries" else (queries, case.kv_length)
    short = min(queries, keys) < ranks
    whole = ("queries" if queries < keys else "keys") if short else ""
    return replace(case, q_length=queries, kv_length=keys, whole=whole)


def layouts_at(
    cases: list[Case | DilatedCase], ranks: int, asked: str, strategy: str, rates: Rates
) -> dict[Hashable, str]:
    """The layout of the sequences of each length, as passes/choose_strategy.py has them."""
    spread = [case for case in cases if isinstance(case, DilatedCase) or not case.whole]
    rows = {case: (case.q_length, case.kv_length) for case in cases}
    cut = [min(rows[case]) if case in spread else max(rows[case]) for case in cases]
    every: set[Hashable] = {length for lengths in rows.values() for length in lengths}
    enough = min(cut) >= 2 * ranks
    if asked != "auto":
        return dict.fromkeys(every, asked)
    kept = [case for case in spread if isinstance(case, Case)]
    thinned = [case for case in spread if isinstance(case, DilatedCase)]
    if not spread or (thinned and not enough):
        return dict.fromkeys(every, "contiguous")
    if not kept:
        return dict.fromkeys(every, dilated_layout_of(thinned, ranks, rates))
    name = choose_layout(kept, ranks, strategy, tuple(LAYOUTS), rates)[0] if enough else "contiguous"
    axes: dict[Hashable, bool] = {length: length >= 2 * ranks for case in kept for length in rows[case]}
    if thinned or len(axes) == 1:
        return dict.fromkeys(every, name)
    sites = [(case, *rows[case]) for case in kept]
    return {**dict.fromkeys(every, name), **choose_layouts(name, sites, axes, ranks, strategy, rates)[0]}


def layout_at(case: Case | DilatedCase, layouts: Mapping[Hashable, str]) -> str:
    """The text of a site's layout: that of its queries, and that of its keys where it is another."""
    return text_of(layouts[case.q_length], layouts[case.kv_length])


# ---- one attention --------------------------------------------------------------------------------------------------
def site_point(
    site: PlannedSite, case: Case | DilatedCase, strategy: str, ranks: int, layout: str, rates: Rates
) -> SitePoint:
    """The prediction for one attention: simulated up to MOST_RANKS ranks, by closed formulas beyond, and where a case
    has none, from fewer ranks with as many tokens each."""
    if isinstance(case, DilatedCase):
        return dilated(site, case, ranks, layout, rates)
    if case.whole:
        strategy = "merge" if case.whole == "queries" else "local"
    elif strategy == "auto":
        strategy = choose_strategy(case, ranks, layout, rates).strategy
    if not estimate(case, ranks, layout, strategy, rates).latent:
        case = case.plain()
    if ranks <= MOST_RANKS:
        return unrolled(site, case, strategy, ranks, layout, rates)
    try:
        return by_formula(site, case, strategy, ranks, layout, rates)
    except OptionError:
        fewer, few = case.on_fewer(ranks)
        point = unrolled(site, fewer, strategy, few, layout, rates)
        return on_more(point, fewer, few, ranks, rates)


def on_more(point: SitePoint, case: Case, few: int, ranks: int, rates: Rates) -> SitePoint:
    """What was found on `few` ranks, with as many rows on each, on `ranks` of them: each sends to more others, and has
    the parts of more to merge."""
    sent, away = (size * (ranks - 1) // (few - 1) for size in (point.bytes, point.between))
    merges = case.whole == "queries"
    more = merged(case.heads, case.q_length, ranks - few, buffered(rates)) if merges else 0
    return replace(point, bytes=sent, between=away, memory=point.memory + more, exact=False, by_rank=())


def buffered(rates: Rates) -> bool:
    """Whether all-gathers go by way of a buffer: not where all ranks read each other's memory."""
    return rates.link.name != "memory"


def dilated(site: PlannedSite, case: DilatedCase, ranks: int, layout: str, rates: Rates) -> SitePoint:
    """Rows that lie beyond the edges of a shard are as many on any number of ranks: what `few` send is what each
    sends."""
    fewer, few = case.on_fewer(ranks)
    ways = [dilated_way(fewer, few, layout, rates, backward) for backward in (False, True)[: 1 + case.training]]
    sent = tuple(site.times * sum(each) for each in zip(*(way.bytes for way in ways), strict=True))
    return SitePoint(
        site.module, fewer.plan(few, layout).strategies, layout, max(ways[0].pairs) // case.heads.q_heads,
        site.times * sum(max(way.flops) for way in ways), max(sent),
        max(sent) * rates.tiers(ranks), site.times * sum(way.seconds for way in ways),
        site.times * sum(way.exposed for way in ways), ways[0].held, ways[-1].held, few == ranks,
        sent if few == ranks else (),
    )  # fmt: skip


def unrolled(site: PlannedSite, case: Case, strategy: str, ranks: int, layout: str, rates: Rates) -> SitePoint:
    """The prediction by simulating the plan, every step of every rank."""
    exchange = case.plan(ranks, layout, strategy)
    directions = (False, True)[: 1 + case.training]
    ways = [simulate(exchange, case.heads, rates, backward) for backward in directions]
    flops = [max(way.flops) for way in ways]
    sent = [site.times * sum(each) for each in zip(*(way.bytes for way in ways), strict=True)]
    away = [
        site.times * sum(bytes_between(exchange, case.heads, rank, rates.node, backward) for backward in directions)
        for rank in range(ranks if rates.tiers(ranks) else 0)
    ]
    held = most_memory(exchange, case.heads, buffered(rates))
    return SitePoint(
        site.module, strategy, layout, flops[0] // case.heads.flops(1, False), site.times * sum(flops), max(sent),
        max(away, default=0),
        site.times * sum(way.seconds for way in ways), site.times * sum(way.exposed for way in ways),
        held.forward, held.backward, True, tuple(sent),
    )  # fmt: skip


def by_formula(site: PlannedSite, case: Case, strategy: str, ranks: int, layout: str, rates: Rates) -> SitePoint:
    """Raises OptionError where there is none."""
    pattern, width = volume_name(case.pattern)
    if case.q_length != case.kv_length and pattern != "full":
        raise OptionError("closed formulas are for self attention")
    if case.heads.latent:
        raise OptionError("closed formulas are for K and V that travel themselves")
    found = formulas_of(pattern, layout, named_strategy(strategy)).at(
        numbers(case, width, ranks, rates, trading(strategy))
    )
    back = case.training
    flops = found["flops"] + back * found["flops_backward"]
    seconds = found["seconds"] + back * found["seconds_backward"]
    return SitePoint(
        site.module, strategy, layout, int(found["pairs"]), site.times * flops,
        site.times * int(found["bytes"] + back * found["bytes_backward"]),
        rates.tiers(ranks) * site.times * int(found["leaving"] + back * found["leaving_backward"]),
        site.times * seconds,
        site.times * max(0.0, seconds - flops / rates.default.rate),
        int(found["memory"]), int(found["memory_backward"]), True,
    )  # fmt: skip


def volume_name(pattern: str) -> tuple[str, int]:
    """The name in ringopt/cost/volume.py, and the width."""
    window = WINDOW.fullmatch(pattern)
    return (f"window{window[2] or ''}", int(window[1])) if window else (pattern, 1)


def named_strategy(strategy: str) -> str:
    """The name in ringopt/cost/formulas.py."""
    return strategy.partition("(")[0]


def numbers(case: Case, width: int, ranks: int, rates: Rates, node: int = 1) -> dict[Any, float]:
    """`node`: ranks that trade rows for heads before keys travel."""
    heads = case.heads
    share = replace(heads, kv_heads=max(1, heads.kv_heads // node))
    forward, backward = (rates.tile(heads.kernel, heads.dtype, way, "full") for way in (False, True))
    rows = case.kv_length * node // ranks
    sides = 1 + case.pattern.endswith("both)")
    leaving = rows if case.pattern in ("full", "causal") else min(rows, sides * (width - 1))
    far = rates.beyond.link if rates.tiers(ranks) else rates.link
    return {
        volume.n: case.kv_length, volume.p: ranks, volume.w: width, volume.batch: heads.batch,
        volume.q_heads: heads.q_heads, volume.kv_heads: heads.kv_heads, volume.k_dim: heads.key_dim,
        volume.v_dim: heads.value_dim, volume.itemsize: heads.itemsize, volume.gradient_itemsize: heads.wide,
        F: forward.rate, o: forward.overhead, F_b: backward.rate, o_b: backward.overhead,
        W: far.rate, L: far.latency, V: rates.link.rate, U: rates.link.latency, s: rates.step,
        volume.g: rates.node if rates.tiers(ranks) else ranks,
        T: exchanges_of(share.kv_heads, leaving, leaving * share.row(), heads.device)[0], Z: least_of(heads.kernel),
        Q: min(1.0, strip_of(rows, heads.device) / max(rows, 1)),
    }  # fmt: skip
