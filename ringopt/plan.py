"""`ringopt.plan`: memory, bytes, FLOPs and time of a model, for any length and any number of ranks, without running it.

The model is traced at the size of its inputs, once for each of a few small numbers of ranks, as `ringopt.explain` does.
What grows with n/p, what with n and what not at all is read off these traces; every attention is then planned anew at
the sizes that are asked for: by its unrolled plan on up to 32 ranks, exactly; by the closed formulas beyond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from ringopt.attention.bytes import bytes_between, bytes_sent
from ringopt.attention.choose import MOST_RANKS, Case, choose, choose_layout, duration
from ringopt.attention.layouts import LAYOUTS
from ringopt.attention.memory import most_memory
from ringopt.attention.patterns import WINDOW
from ringopt.attention.plans import hybrid, trading
from ringopt.attention.predict import simulate
from ringopt.attention.strips import least_of
from ringopt.attention.turns import exchanges_of
from ringopt.cost import volume
from ringopt.cost.formulas import F, F_b, Formulas, L, T, U, V, W, Z, formulas_of, o, o_b, s
from ringopt.cost.hardware import Device, device_of
from ringopt.cost.rates import Rates, rates_of
from ringopt.errors import OptionError
from ringopt.given import counts_of
from ringopt.options import Options
from ringopt.report import readable
from ringopt.traced import TRACED, PlannedSite, Traced, traced

LENGTHS = tuple(1 << power for power in range(12, 25, 2))  # 4 Ki to 16 Mi


@dataclass(frozen=True)
class SitePoint:
    """Predictions for one attention (all `times` of it) at one size, forward and backward together. `between`: of the
    bytes those that leave the node, of the rank that sends most of them. `memory`, `memory_backward`: bytes that one of
    them holds at once, as attention/memory.py counts them."""

    module: str
    strategy: str
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


@dataclass(frozen=True)
class Point:
    """Predictions per rank at one length and number of ranks, for the busiest rank, of a training step or a forward.
    `between`: of the bytes those that leave the node, at most."""

    length: int
    world_size: int
    layout: str
    memory: int
    fits: bool
    bytes: int
    between: int
    flops: float
    seconds: float
    exposed: float
    sites: tuple[SitePoint, ...]

    @property
    def strategies(self) -> str:
        return ", ".join(dict.fromkeys(site.strategy for site in self.sites))


@dataclass(frozen=True)
class Plan:
    """Prints itself as a table. Each `node` ranks are joined by `link`, nodes by `network`; 0 and "" where all ranks
    are joined alike. `points`: by length, then by number of ranks; `longest`: by number of ranks, the longest of
    lengths that double from 1,024 to 16 Mi that fits the device's memory, None where none does."""

    hardware: str
    link: str
    node: int
    network: str
    training: bool
    points: tuple[Point, ...]
    longest: Mapping[int, int | None]
    notes: tuple[str, ...]
    traced: Traced = field(repr=False)

    def sent(self, point: Point) -> str:
        away = f"\n{point.between / max(point.bytes, 1):.0%} off node" if self.network else ""
        return f"{readable(point.bytes)}{away}"

    @property
    def links(self) -> str:
        return f"{self.link}, {self.network} between nodes of {self.node}" if self.network else self.link

    def to_dict(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "link": self.link,
            "node": self.node,
            "network": self.network,
            "training": self.training,
            "points": [asdict(point) for point in self.points],
            "longest": dict(self.longest),
            "notes": list(self.notes),
        }

    def formulas(self) -> dict[str, Formulas]:
        """The closed formulas of the exchanges that were chosen, by "pattern layout strategy"."""
        found = {}
        for point in self.points:
            for site, planned in zip(point.sites, self.traced.sites, strict=True):
                pattern, _width = named(planned.case.pattern)
                try:
                    found[f"{pattern} {point.layout} {site.strategy}"] = formulas_of(
                        pattern, point.layout, named_strategy(site.strategy)
                    )
                except OptionError:
                    continue  # has none
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        what = "a training step" if self.training else "a forward"
        table = Table(title=f"{what} per rank, {self.hardware} over {self.links}, predicted", title_justify="left")
        for name in ("tokens", "ranks", "memory", "fits", "sent", "TFLOP", "time", "exposed"):
            whole = name in ("tokens", "ranks", "TFLOP")
            table.add_column(name, justify="right", overflow="fold", no_wrap=whole)
        table.add_column("exchange", overflow="fold")
        for point in self.points:
            table.add_row(
                *(f"{point.length:,}", f"{point.world_size:,}", readable(point.memory), "yes" if point.fits else "no"),
                *(self.sent(point), f"{point.flops / 1e12:,.3g}", duration(point.seconds)),
                *(f"{point.exposed / point.seconds:.0%}", f"{point.strategies}, {point.layout}"),
            )
        yield table
        for ranks, length in self.longest.items():
            told = f"up to {length:,} tokens fit" if length else "not even the shortest length fits"
            yield f"{ranks:,} ranks: {told}"
        yield from self.notes

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()


def plan(
    model: Any,
    *args: Any,
    world_size: int | Sequence[int] = 512,
    hardware: str = "h100",
    link: str | None = None,
    lengths: Sequence[int] | None = None,
    options: Mapping[str, Any] | Options | None = None,
    **kwargs: Any,
) -> Plan:
    """Predicts `torch.compile(model, backend="ring")(*args, **kwargs)` and its backward on `world_size` ranks, one
    number or several, for the sequence as long as each of `lengths` (default: 4,096 to 16,777,216 tokens).

    `hardware` and `link` are names of ringopt/cost/hardware.py ("h100", "infiniband-ndr"; default: the link that the
    device comes with). The model is traced with the inputs as they are, in which the sequence needs 8 rows at least:
    nothing is executed and none of the sizes that are asked for is made. Other sequences of the model (of an encoder
    beside a decoder) grow in proportion. Raises OptionError, and what the model raises.
    """
    sizes, asked = counts_of("world_size", world_size), counts_of("lengths", LENGTHS if lengths is None else lengths)
    chosen, device = Options.of(options), device_of(hardware)
    # What is read off traces is the same in every strategy; their few ranks are on one node.
    on_one_node = replace(chosen, strategy="ring") if chosen.strategy == "hybrid" else chosen
    found = traced(model, args, kwargs, on_one_node, hardware)
    if not found.sites:
        why = "; ".join(found.refused) or "no attention was found"
        raise OptionError(f"there is nothing to plan, no attention of this model can be sharded: {why}")
    rates = rates_of(hardware, found.sites[0].case.heads.dtype, link)
    points = [point_of(found, chosen, device, rates, n, p) for n in asked for p in sizes if n >= 2 * p]
    if not points:
        raise OptionError(f"lengths={asked}: every one is shorter than 2 rows for each of {min(sizes)} ranks")
    longest = {p: longest_of(found, chosen, device, rates, p) for p in sizes}
    notes = [f"not sharded: {reason}" for reason in found.refused]
    if any(not site.exact for point in points for site in point.sites):
        notes.append(f"bytes beyond {MOST_RANKS} ranks of exchanges without closed formulas are scaled from those")
    network = rates.between.name if rates.between is not None else ""
    return Plan(
        hardware, rates.link.name, rates.node, network, found.training, tuple(points), longest, tuple(notes), found
    )


# ---- what follows for other sizes ------------------------------------------------------------------------------------
def point_of(found: Traced, options: Options, device: Device, rates: Rates, length: int, ranks: int) -> Point:
    cases = [at_length(site.case, length, found.length) for site in found.sites]
    layout: str = options.layout
    strategy = over_nodes(options.strategy, ranks, rates)
    if layout == "auto":
        layout, _why = choose_layout(cases, ranks, strategy, tuple(LAYOUTS), rates)
    sites = tuple(
        site_point(site, case, strategy, ranks, layout, rates) for site, case in zip(found.sites, cases, strict=True)
    )
    scale = length / found.length
    ways = 3 if found.training else 1  # a backward has two products for each of the forward
    others = ways * scale * (found.shared_flops / ranks + found.own_flops)
    sent = sent_in_all(found, sites, scale, ranks)
    moved = sent - sum(site.bytes for site in sites)
    # Collectives go round: the last rank of a node sends all to the next node.
    wire, far = (rates.beyond.link, moved) if rates.tiers(ranks) else (rates.link, 0)
    exposed = sum(site.exposed for site in sites) + moved / wire.rate
    memory = memory_at(found, sites, scale, ranks)
    return Point(
        length, ranks, layout, memory, memory <= device.memory,
        sent, far + sum(site.between for site in sites),
        sum(site.flops for site in sites) + others,
        sum(site.seconds for site in sites) + others / rates.default.rate + moved / wire.rate,
        exposed, sites,
    )  # fmt: skip


def over_nodes(strategy: str, ranks: int, rates: Rates) -> str:
    """ "hybrid" with the ranks of a node. Raises OptionError where there are not several nodes."""
    if strategy == "hybrid" and not rates.tiers(ranks):
        raise OptionError(
            f"strategy 'hybrid' takes several nodes, and {ranks} ranks are joined by {rates.link.name} alone ("
            f"{rates.source}). Ask for more ranks, or another strategy"
        )
    return hybrid(rates.node) if strategy == "hybrid" else strategy


def at_length(case: Case, length: int, of: int) -> Case:
    q_length, kv_length = (max(1, n * length // of) for n in (case.q_length, case.kv_length))
    return replace(case, q_length=q_length, kv_length=kv_length)


def site_point(site: PlannedSite, case: Case, strategy: str, ranks: int, layout: str, rates: Rates) -> SitePoint:
    if strategy == "auto":
        strategy = choose(case, ranks, layout, rates).strategy
    if ranks <= MOST_RANKS:
        return unrolled(site, case, strategy, ranks, layout, rates)
    try:
        return by_formula(site, case, strategy, ranks, layout, rates)
    except OptionError:
        fewer, few = case.on_fewer(ranks)
        point = unrolled(site, fewer, strategy, few, layout, rates)
        sent, away = (size * (ranks - 1) // (few - 1) for size in (point.bytes, point.between))
        return replace(point, bytes=sent, between=away, exact=False, by_rank=())


def unrolled(site: PlannedSite, case: Case, strategy: str, ranks: int, layout: str, rates: Rates) -> SitePoint:
    exchange = case.plan(ranks, layout, strategy)
    directions = (False, True)[: 1 + case.training]
    ways = [simulate(exchange, case.heads, rates, backward) for backward in directions]
    flops = [max(way.flops) for way in ways]
    sent = [
        site.times * sum(bytes_sent(exchange, case.heads, rank, backward) for backward in directions)
        for rank in range(ranks)
    ]
    away = [
        site.times * sum(bytes_between(exchange, case.heads, rank, rates.node, backward) for backward in directions)
        for rank in range(ranks if rates.tiers(ranks) else 0)
    ]
    held = most_memory(exchange, case.heads)
    return SitePoint(
        site.module, strategy, flops[0] // case.heads.flops(1, False), site.times * sum(flops), max(sent),
        max(away, default=0),
        site.times * sum(way.seconds for way in ways), site.times * sum(way.exposed for way in ways),
        held.forward, held.backward, True, tuple(sent),
    )  # fmt: skip


def by_formula(site: PlannedSite, case: Case, strategy: str, ranks: int, layout: str, rates: Rates) -> SitePoint:
    """Raises OptionError where there is none."""
    pattern, width = named(case.pattern)
    if case.q_length != case.kv_length and pattern != "full":
        raise OptionError("closed formulas are for self attention")
    found = formulas_of(pattern, layout, named_strategy(strategy)).at(
        numbers(case, width, ranks, rates, trading(strategy))
    )
    back = case.training
    flops = found["flops"] + back * found["flops_backward"]
    seconds = found["seconds"] + back * found["seconds_backward"]
    return SitePoint(
        site.module, strategy, int(found["pairs"]), site.times * flops,
        site.times * int(found["bytes"] + back * found["bytes_backward"]),
        rates.tiers(ranks) * site.times * int(found["leaving"] + back * found["leaving_backward"]),
        site.times * seconds,
        site.times * max(0.0, seconds - flops / rates.default.rate),
        int(found["memory"]), int(found["memory_backward"]), True,
    )  # fmt: skip


def named(pattern: str) -> tuple[str, int]:
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
        T: exchanges_of(share.kv_heads, leaving, leaving * share.row())[0], Z: least_of(heads.kernel),
    }  # fmt: skip


def sent_in_all(found: Traced, sites: Sequence[SitePoint], scale: float, ranks: int) -> int:
    """By the rank that sends most: exactly at a traced size. Elsewhere, of each value beside the attentions (p-1)/p is
    sent, as its ring algorithm has it."""
    if ranks in found.moved and scale == 1:
        beside = [sum(each) for each in found.moved[ranks]]
        return max(sum(site.by_rank[rank] for site in sites) + beside[rank] for rank in range(ranks))
    growing, fixed = map(max, zip(*found.moved[TRACED[-1]], strict=True))
    whole = (growing * scale + fixed) * TRACED[-1] / (TRACED[-1] - 1)
    return sum(site.bytes for site in sites) + int(whole * (ranks - 1) / ranks)


def memory_at(found: Traced, sites: Sequence[SitePoint], scale: float, ranks: int) -> int:
    """Parameters, and the most that is live: a part that falls with p and one that does not, from two traces, each in
    proportion to the length; at an attention with what it holds. Gradients of parameters, made while activations go,
    count where they are more."""
    few, more = (found.live[p] for p in TRACED)
    forward, backward = (max(getattr(site, name) for site in sites) for name in ("memory", "memory_backward"))
    pairs = [(few.step, more.step, 0)]
    pairs.append((few.at_attention, more.at_attention, forward))
    pairs.append((few.at_attention_backward, more.at_attention_backward, backward))
    most = max(int(part(one, two, ranks) * scale) + extra for one, two, extra in pairs)
    return more.parameters + max(more.gradients, most)


def part(few: int, more: int, ranks: int) -> float:
    """a / p + b through the values at the traced numbers of ranks."""
    p, q = TRACED
    a = max(0.0, (few - more) / (1 / p - 1 / q))
    return a / ranks + max(0.0, more - a / q)


def longest_of(found: Traced, options: Options, device: Device, rates: Rates, ranks: int) -> int | None:
    """Of lengths that double from 1,024 to 16 Mi; more tokens never need less."""
    lengths = [1 << power for power in range(10, 25) if 1 << power >= 2 * ranks]
    fit = bisect_left(lengths, True, key=lambda n: not point_of(found, options, device, rates, n, ranks).fits)
    return lengths[fit - 1] if fit else None
