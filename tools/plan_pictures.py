"""The pictures of a plan: memory against length, what the time goes to, and one attention over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.context_parallel.plan.plan_of import hybrid, trading
from ringopt.cost.choose import Case
from ringopt.cost.dilated import DilatedCase
from ringopt.cost.simulate import SimSpan, simulate
from ringopt.hardware.devices import GIB, device_of
from ringopt.hardware.rates import Rates, rates_of
from ringopt.output.files import write_whole
from ringopt.planner.plan import Plan, Point
from ringopt.planner.site_cost import SitePoint, at_length
from ringopt.tools.common.command import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

DRAWN = 8  # ranks of the timeline, at most
COLOURS = {"compute": "#4c78a8", "exchange": "#f58518"}


def check_matplotlib() -> None:
    """Raises CommandError unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandError("pictures need matplotlib: pip install 'ringopt[plot]'") from None


def check_picture(target: Path) -> None:
    """Before any work: raises CommandError for an ending that matplotlib cannot write."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if target.suffix.lower().removeprefix(".") not in known:
        raise CommandError(f"--plot {target}: the name of a picture ends in one of .{', .'.join(sorted(known))}")


def draw(plan: Plan, target: Path) -> None:
    """Raises CommandError where the file cannot be written."""
    try:
        content = BytesIO()
        _figure_of(plan).savefig(content, format=target.suffix.lower().removeprefix("."))
        write_whole(target, content.getvalue())
    except (OSError, ValueError) as problem:
        raise CommandError(f"--plot {target}: {problem}") from None


def _figure_of(plan: Plan) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), layout="constrained")
    rows = figure.add_gridspec(3, 1)
    memory, time, line = (figure.add_subfigure(rows[number]) for number in range(3))
    _draw_memory(plan, memory.subplots())
    draw_time(plan, time)
    draw_timeline(plan, line.subplots())
    return figure


def _by_ranks(plan: Plan) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for point in plan.points:
        found.setdefault(point.world_size, []).append(point)
    return found


def _draw_memory(plan: Plan, axes: Axes) -> None:
    for ranks, points in _by_ranks(plan).items():
        axes.plot([p.length for p in points], [p.memory / GIB for p in points], marker="o", label=f"{ranks:,} ranks")
    device = device_of(plan.hardware).memory / GIB
    axes.axhline(device, color="black", linestyle="--", label=f"{plan.hardware}: {device:,.0f} GiB")
    axes.set(yscale="log", ylabel="GiB per rank", xlabel="tokens", title="memory of a rank")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xscale("log", base=2)
    lengths = sorted({point.length for point in plan.points})
    axes.set_xticks(lengths, list(map(_binary_number, lengths)))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def draw_time(plan: Plan, figure: SubFigure) -> None:
    """A panel for each number of ranks."""
    groups = _by_ranks(plan)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (ranks, points) in zip(panels, groups.items(), strict=True):
        names = [_binary_number(point.length) for point in points]
        exposed = [100 * point.exposed / point.seconds for point in points]
        rest = [100 - share for share in exposed]
        axes.bar(names, rest, color=COLOURS["compute"], label="compute")
        axes.bar(names, exposed, bottom=rest, color=COLOURS["exchange"], label="exchange that nothing hides")
        axes.tick_params(axis="x", rotation=90, labelsize=8)
        axes.set(title=f"{ranks:,} ranks", ylim=(0, 100))
    panels[0].set_ylabel("% of the time")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1))


@dataclass(frozen=True)
class DrawnAttention:
    """The spans of the forward of one attention, and which it is."""

    subtitle: str
    ranks: int
    spans: Sequence[SimSpan]


def draw_timeline(plan: Plan, axes: Axes) -> None:
    """The forward of one attention."""
    drawn = drawn_attention(plan)
    if drawn is None:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no attention here is exchanged in steps that can be drawn", ha="center", va="center")
        return
    _draw_spans(axes, drawn.spans, drawn.ranks)
    axes.set_title(f"the forward of one attention: {drawn.subtitle}", fontsize=10)


def drawn_attention(plan: Plan) -> DrawnAttention | None:
    """On as many ranks as can be seen, each with as many rows as at the point that is drawn: one at which messages and
    blocks take about as long, so that what is hidden can be seen. None where no attention is exchanged in steps."""
    rates = rates_of(plan.hardware, plan.traced.dtype, None if plan.network else plan.link)
    drawn = [
        (point, number)
        for point in plan.points
        for number, site in enumerate(plan.traced.sites)
        if point.world_size > 1 and isinstance(site.case, Case) and not site.case.whole
    ]
    if not drawn:
        return None
    point, number = min(drawn, key=lambda at: (not travels(*at), abs(log_share(at[0].sites[at[1]], rates))))
    few = on_few_ranks(plan, point, number)
    assert isinstance(few.case, Case)
    if trading(few.strategy) > 1:
        rates = replace(rates, node=trading(few.strategy))
    layout = point.sites[number].layout
    spans = simulate(few.case.plan(few.ranks, layout, few.strategy), few.case.heads, rates, False, drawn=True).spans
    return DrawnAttention(f"{few.case.pattern}, {few.which}, {few.strategy}, {layout}", few.ranks, spans)


@dataclass(frozen=True)
class FewRanks:
    """One attention of a point, on as many ranks as can be drawn, each with as many rows as there."""

    case: Case | DilatedCase
    ranks: int
    strategy: str
    which: str


def on_few_ranks(plan: Plan, point: Point, number: int) -> FewRanks:
    """A pattern that lists rows has no other length: it stays on all ranks."""
    planned, strategy = plan.traced.sites[number].case, point.sites[number].strategy
    listing = isinstance(planned, Case) and planned.lists_rows
    ranks = point.world_size if listing else min(DRAWN, point.world_size)
    length = max(point.length * ranks // point.world_size, 2 * ranks)
    case = at_length(planned, length, plan.traced.length, ranks)
    if trading(strategy) > 1 and 2 < ranks < point.world_size:  # two nodes can be seen too, of fewer ranks
        strategy = hybrid(ranks // 2)
    which = f"{case.q_length:,} tokens, {ranks} ranks" + (f" as of {point.world_size:,}" * (ranks < point.world_size))
    return FewRanks(case, ranks, strategy, which)


def travels(point: Point, number: int) -> bool:
    """Keys go from rank to rank, a block after the other."""
    return point.sites[number].strategy in ("ring", "ring2", "halo")


def log_share(site: SitePoint, rates: Rates) -> float:
    """0 where messages take as long as blocks."""
    return log(max(site.bytes / rates.link.rate, 1e-12) / max(site.flops / rates.default.rate, 1e-12))


def _draw_spans(axes: Axes, spans: Sequence[SimSpan], ranks: int) -> None:
    end, labelled = max(span.stop for span in spans), set[str]()
    size, unit = (1e3, "ms") if end > 2e-3 else (1e6, "us")
    for span in spans:
        where = span.rank + (0.2 if span.kind == "exchange" else -0.2)
        style: dict[str, Any] = {"color": COLOURS[span.kind], "edgecolor": "white", "height": 0.38}
        label = None if span.kind in labelled else span.kind
        axes.barh(where, (span.stop - span.start) * size, left=span.start * size, label=label, **style)
        if span.stop - span.start > end / 12:  # else there is no room for it
            middle = (span.start + span.stop) / 2 * size
            axes.text(middle, where, span.label, ha="center", va="center", fontsize=7, color="white")
        labelled.add(span.kind)
    axes.set(yticks=range(ranks), xlabel=unit, ylabel="rank", xlim=(0, None))
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _binary_number(length: int) -> str:
    for unit, size in (("Mi", 1 << 20), ("Ki", 1 << 10)):
        if length >= size:
            return f"{length / size:g} {unit}" if length % (size // 16) == 0 else f"{length / size:.1f} {unit}"
    return str(length)
