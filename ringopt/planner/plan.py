"""`ringopt.plan`: memory, bytes, FLOPs and time of a model, for any length and any number of ranks, without running it.

The model is traced at the size of its inputs, once for each of a few small numbers of ranks, as `ringopt.explain` does.
What grows with n/p, what with n and what not at all is read off these traces; every attention is then planned anew at
the sizes that are asked for: by its unrolled plan on up to 32 ranks, exactly; by the closed formulas beyond.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from torch.export import ExportedProgram

from ringopt.arguments import check_model, counts_of
from ringopt.context_parallel.plan.plan_of import hybrid
from ringopt.cost.choose import MOST_RANKS, Case, duration
from ringopt.cost.formulas import Formulas, formulas_of
from ringopt.errors import OptionError
from ringopt.hardware.devices import Device, device_of
from ringopt.hardware.rates import Rates, rates_of
from ringopt.options import Options, with_defaults
from ringopt.output.plainly import Plainly
from ringopt.planner.liveness import most
from ringopt.planner.site_cost import (
    SitePoint,
    at_length,
    layout_at,
    layouts_at,
    named_strategy,
    site_point,
    volume_name,
)
from ringopt.planner.trace_model import TRACED, PlannedSite, Traced, traced
from ringopt.report import bytes_text, counted, several

LONGEST = 1 << 24  # tokens
LENGTHS = tuple(1 << power for power in range(12, 25, 2))  # 4 Ki to 16 Mi


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
        """Of the attentions, "" without one."""
        return ", ".join(dict.fromkeys(site.strategy for site in self.sites))


@dataclass(frozen=True, repr=False)
class Plan:
    """Prints itself as a table. Each `node` ranks are joined by `link`, nodes by `network`; 0 and "" where all ranks
    are joined alike. `points`: by length, then by number of ranks; `longest`: by number of ranks, the longest length
    from 1,024 to 16 Mi that fits the device's memory, to a 64th, None where none does."""

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
        return f"{bytes_text(point.bytes)}{away}"

    def exchange(self, point: Point) -> str:
        """The strategies of the attentions, or that of pairs without one, and the layout."""
        how = point.strategies or ("gather" if self.traced.pairs else "")
        return f"{how}, {point.layout}" if how else point.layout

    def fitting(self, length: int | None) -> str:
        """The longest length that fits, with what caps it."""
        return self.cap(length) if length is None else f"up to {length:,} tokens fit, {self.cap(length)}"

    def cap(self, length: int | None) -> str:
        """Why no longer one than `length` fits, or is looked at."""
        if length is None:
            return "not even the shortest length fits"
        if any(listing(self.traced)):
            return "the one length of its mask"
        if length >= LONGEST:
            return "the longest that is looked at"
        return f"then the {bytes_text(device_of(self.hardware).memory)} of {self.hardware} are full"

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
                pattern, _width = volume_name(planned.case.pattern)
                try:
                    found[f"{pattern} {site.layout} {site.strategy}"] = formulas_of(
                        pattern, site.layout, named_strategy(site.strategy)
                    )
                except OptionError:
                    continue  # has none
        return found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Plainly(Group(*self.rich()))

    def rich(self) -> Iterator[RenderableType]:
        what = "a training step" if self.training else "a forward"
        table = Table(title=f"{what} per rank, {self.hardware} over {self.links}, predicted", title_justify="left")
        for name in ("tokens", "ranks", "memory", "fits", "sent", "FLOP", "time", "exposed"):
            whole = name in ("tokens", "ranks", "FLOP")
            table.add_column(name, justify="right", overflow="fold", no_wrap=whole)
        table.add_column("exchange", overflow="fold")
        for point in self.points:
            table.add_row(
                *(f"{point.length:,}", f"{point.world_size:,}", bytes_text(point.memory)),
                *("yes" if point.fits else "no", self.sent(point), counted(point.flops), duration(point.seconds)),
                *(f"{point.exposed / point.seconds:.0%}", self.exchange(point)),
            )
        yield table
        for ranks, length in self.longest.items():
            yield f"{several(ranks, 'rank')}: {self.fitting(length)}"
        yield from self.notes

    def __repr__(self) -> str:
        return f"<ringopt.Plan: {several(len(self.points), 'point')} on {self.hardware} over {self.links}>"

    def __str__(self) -> str:
        console = Console(width=100, no_color=True)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<pre>{escape(str(self))}</pre>"


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

    `hardware` and `link` are names of ringopt/hardware/devices.py ("h100", "infiniband-ndr"; default: the link that the
    device comes with). The model is traced with the inputs as they are, in which the sequence needs 8 rows at least:
    nothing is executed and none of the sizes that are asked for is made. Other sequences of the model (of an encoder
    beside a decoder) grow in proportion. Raises OptionError, and what the model raises.
    """
    asked = PlanRequest.of(world_size, hardware, link, lengths, options)
    if isinstance(model, ExportedProgram):
        raise OptionError("an exported program is planned as the module that it makes: pass program.module()")
    check_model(model)
    return predicted(model, args, kwargs, asked, lambda _done, _of: None)


@dataclass(frozen=True)
class PlanRequest:
    """What `plan` is asked for, checked."""

    world_sizes: Sequence[int]
    lengths: Sequence[int]
    device: Device
    link: str | None
    options: Options

    @classmethod
    def of(
        cls,
        world_size: int | Sequence[int],
        hardware: str,
        link: str | None,
        lengths: Sequence[int] | None,
        options: Mapping[str, Any] | Options | None,
    ) -> PlanRequest:
        """Raises OptionError."""
        sizes = counts_of("world_size", world_size)
        wanted = counts_of("lengths", LENGTHS if lengths is None else lengths)
        if max(wanted) < 2 * min(sizes):
            raise OptionError(f"lengths={wanted}: every one is shorter than 2 rows for each of {min(sizes)} ranks")
        rates_of(hardware, "float32", link)  # names that the table does not have are errors before any work
        return cls(sizes, wanted, device_of(hardware), link, with_defaults(options))

    def rates(self, dtype: str) -> Rates:
        return rates_of(self.device.name, dtype, self.link)


def predicted(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], asked: PlanRequest, progress: Callable[[int, int], None]
) -> Plan:
    """The plan; `progress(done, of)` is called after each part of the work."""
    sizes = [(n, p) for n in asked.lengths for p in asked.world_sizes if n >= 2 * p]
    parts, points = 1 + len(sizes) + len(asked.world_sizes), list[Point]()
    # What is read off traces is the same in every strategy; their few ranks are on one node.
    hybrid_asked = asked.options.strategy == "hybrid"
    on_one_node = replace(asked.options, strategy="ring") if hybrid_asked else asked.options
    found = traced(model, args, kwargs, on_one_node, asked.device.name)
    if not found.length:
        why = "; ".join(found.refused) or "no attention and no recurrence was found"
        raise OptionError(f"there is nothing to plan, nothing of this model can be sharded: {why}")
    check_lengths(found, asked.lengths)
    rates, longest = asked.rates(found.dtype), dict[int, int | None]()
    for n, p in sizes:
        progress(1 + len(points), parts)
        points.append(point_of(found, asked.options, asked.device, rates, n, p))
    for p in asked.world_sizes:
        progress(1 + len(points) + len(longest), parts)
        fitting = [point.length for point in points if point.world_size == p and point.fits]
        longest[p] = max([*fitting, longest_of(found, asked.options, asked.device, rates, p) or 0]) or None
    notes = [f"not sharded: {reason}" for reason in found.refused]
    notes += found.pairs
    notes += [
        f"{name} has {rows:,} positions, so the model takes no longer input; it is planned as if it had more"
        for name, rows in found.positions.items()
        if rows < max(asked.lengths)
    ]
    if any(one.bound for ranks in found.moved.values() for each in ranks for one in each):
        notes.append("rows that are looked up by number are counted as if the busiest rank had them all")
    if any(not site.exact for point in points for site in point.sites):
        notes.append(f"bytes beyond {MOST_RANKS} ranks of exchanges without closed formulas are scaled from those")
    network = rates.between.name if rates.between is not None else ""
    return Plan(
        asked.device.name, rates.link.name, rates.node, network, found.training, tuple(points), longest, tuple(notes),
        found,
    )  # fmt: skip


# ---- what follows for other sizes ------------------------------------------------------------------------------------
def point_of(found: Traced, options: Options, device: Device, rates: Rates, length: int, ranks: int) -> Point:
    """The prediction for a step at one length (tokens) and number of ranks: bytes, FLOPs and seconds of a rank."""
    cases = [at_length(site.case, length, found.length, ranks) for site in found.sites]
    strategy = over_nodes(options.strategy, ranks, rates)
    layouts = layouts_at(cases, ranks, options.layout, strategy, rates) if cases else {}
    sites = tuple(
        site_point(site, case, strategy, ranks, layout_at(case, layouts), rates)
        for site, case in zip(found.sites, cases, strict=True)
    )
    scale = length / found.length
    ways = 3 if found.training else 1  # a backward has two products for each of the forward
    others = ways * scale * ((found.shared_flops + scale * found.pair_flops) / ranks + found.own_flops)
    sent = sent_in_all(found, sites, scale, ranks)
    moved = sent - sum(site.bytes for site in sites)
    # Collectives go round: the last rank of a node sends all to the next node.
    wire, far = (rates.beyond.link, moved) if rates.tiers(ranks) else (rates.link, 0)
    exposed = sum(site.exposed for site in sites) + moved / wire.rate
    memory = memory_at(found, sites, scale, ranks)
    alone = "contiguous" if options.layout == "auto" else options.layout  # of pairs without a site
    return Point(
        length, ranks, " and ".join(dict.fromkeys(site.layout for site in sites)) or alone, memory,
        memory <= device.memory,
        sent, far + sum(site.between for site in sites),
        sum(site.flops for site in sites) + others,
        sum(site.seconds for site in sites) + others / rates.default.rate + moved / wire.rate,
        exposed, sites,
    )  # fmt: skip


def check_lengths(found: Traced, lengths: Sequence[int]) -> None:
    """Raises OptionError where the model is one of the traced length alone."""
    site = next(listing(found), None)
    if site is not None and set(lengths) != {found.length}:
        raise OptionError(
            f"lengths={list(lengths)}: the mask of {site.module} is told by numbers of rows "
            f"({site.case.pattern[:40]}...), so it is planned at the length of the inputs alone. Pass "
            f"lengths=[{found.length}], or inputs of the length that you want"
        )


def listing(found: Traced) -> Iterator[PlannedSite]:
    """Sites whose patterns have no other length."""
    return (site for site in found.sites if isinstance(site.case, Case) and site.case.lists_rows)


def over_nodes(strategy: str, ranks: int, rates: Rates) -> str:
    """ "hybrid" with the ranks of a node. Raises OptionError where there are not several nodes."""
    if strategy == "hybrid" and not rates.tiers(ranks):
        raise OptionError(
            f"strategy 'hybrid' takes several nodes, and {ranks} ranks are joined by {rates.link.name} alone ("
            f"{rates.source}). Ask for more ranks, or another strategy"
        )
    return hybrid(rates.node) if strategy == "hybrid" else strategy


def sent_in_all(found: Traced, sites: Sequence[SitePoint], scale: float, ranks: int) -> int:
    """By the rank that sends most. Rows that go from rank to rank are counted where they were traced; on other numbers
    of ranks, what the busiest rank sent there."""
    exact = ranks in found.moved and all(site.by_rank for site in sites)
    others = [sum(one.at(ranks, scale) for one in each) for each in found.moved[ranks if exact else TRACED[-1]]]
    if exact:
        return max(sum(site.by_rank[rank] for site in sites) + others[rank] for rank in range(ranks))
    return sum(site.bytes for site in sites) + (max(others) if ranks > 1 else 0)


def memory_at(found: Traced, sites: Sequence[SitePoint], scale: float, ranks: int) -> int:
    """Parameters, and the most that is live, gradients included; at an attention with what that holds. On other numbers
    of ranks than were traced, a part that falls with p and one that does not, from the two traces."""
    names = ("memory", "memory_backward")
    forward, backward = (max((getattr(site, name) for site in sites), default=0) for name in names)
    kinds = (("moments", 0), ("at_attention", forward), ("at_attention_backward", backward))

    def live(name: str, traced: int) -> int:
        return sum(most(getattr(graph, name), scale) for graph in found.live[traced])

    def at(name: str) -> int:
        few, more = (live(name, p) for p in TRACED)
        return live(name, ranks) if ranks in TRACED else round(part(few, more, ranks))

    parameters = sum(graph.parameters for graph in found.live[TRACED[-1]])
    return parameters + max(at(name) + others for name, others in kinds)


def part(few: int, more: int, ranks: int) -> float:
    """a / p + b through the values at the traced numbers of ranks."""
    p, q = TRACED
    a = max(0.0, (few - more) / (1 / p - 1 / q))
    return a / ranks + max(0.0, more - a / q)


def longest_of(found: Traced, options: Options, device: Device, rates: Rates, ranks: int) -> int | None:
    """From 1,024 to LONGEST, to a 64th, or of the one length that there is; more tokens never need less."""

    def is_too_long(length: int) -> bool:
        return not point_of(found, options, device, rates, length, ranks).fits

    doubled = (1 << power for power in range(10, LONGEST.bit_length()))
    lengths = [n for n in ((found.length,) if any(listing(found)) else doubled) if n >= 2 * ranks]
    fit = bisect_left(lengths, True, key=is_too_long)
    if fit in (0, len(lengths)):
        return lengths[fit - 1] if fit else None
    finer = range(lengths[fit - 1], lengths[fit], lengths[fit - 1] // 64)
    return finer[bisect_left(finer, True, key=is_too_long) - 1]
