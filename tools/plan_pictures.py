"""The pictures of a plan: memory against length, time split, and the timeline of one attention over the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.attention.predict import simulate
from ringopt.cost.hardware import GIB, device_of
from ringopt.cost.rates import rates_of
from ringopt.plan import Plan, at_length
from ringopt.tools.command import CommandError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWN = 8  # ranks of the timeline, at most
COLOURS = {"compute": "#4c78a8", "exchange": "#f58518"}


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'ringopt[plot]'") from None


def draw(plan: Plan, target: Path) -> None:
    """Raises CommandError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 12), layout="constrained")
    memory, time, line = figure.subplots(3, 1)
    draw_memory(plan, memory)
    draw_time(plan, time)
    draw_timeline(plan, line)
    try:
        figure.savefig(target)
    except (OSError, ValueError) as problem:
        raise CommandError(f"--plot {target}: {problem}") from None


def draw_memory(plan: Plan, axes: Axes) -> None:
    for ranks in dict.fromkeys(point.world_size for point in plan.points):
        points = [point for point in plan.points if point.world_size == ranks]
        axes.plot([p.length for p in points], [p.memory / GIB for p in points], marker="o", label=f"{ranks:,} ranks")
    axes.axhline(device_of(plan.hardware).memory / GIB, color="black", linestyle="--", label=plan.hardware)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GiB per rank", title="memory")
    axes.set_xscale("log", base=2)
    axes.legend()


def draw_time(plan: Plan, axes: Axes) -> None:
    names = [f"{point.length:,}\n{point.world_size:,}" for point in plan.points]
    exposed = [100 * point.exposed / point.seconds for point in plan.points]
    axes.bar(names, [100 - share for share in exposed], color=COLOURS["compute"], label="compute")
    axes.bar(
        names, exposed, bottom=[100 - share for share in exposed], color=COLOURS["exchange"], label="exposed exchange"
    )
    axes.tick_params(axis="x", labelsize=7)
    axes.set(xlabel="tokens, ranks", ylabel="% of the time", title="what the time goes to")
    axes.legend()


def draw_timeline(plan: Plan, axes: Axes) -> None:
    """The forward of the first attention, on as many of the ranks of the first point as can be seen."""
    site, point = plan.traced.sites[0], plan.points[0]
    ranks = min(DRAWN, max(2, point.world_size))
    case = at_length(site.case, max(point.length, 2 * ranks), plan.traced.length)
    rates = rates_of(plan.hardware, case.heads.dtype, plan.link)
    exchange = case.plan(ranks, point.layout, point.sites[0].strategy)
    drawn: set[str] = set()
    for span in simulate(exchange, case.heads, rates, False).spans:
        where = span.rank + (0.18 if span.kind == "exchange" else -0.18)
        style: dict[str, Any] = {"color": COLOURS[span.kind], "edgecolor": "white", "height": 0.34}
        label = None if span.kind in drawn else span.kind
        axes.barh(where, (span.stop - span.start) * 1e6, left=span.start * 1e6, label=label, **style)
        if span.kind == "compute":
            axes.text((span.start + span.stop) / 2 * 1e6, where, span.label, ha="center", va="center", fontsize=6)
        drawn.add(span.kind)
    axes.set(yticks=range(ranks), xlabel="us", ylabel="rank")
    axes.set_title(f"one attention ({case.pattern}, {case.q_length:,} tokens, {point.sites[0].strategy}), forward")
    axes.invert_yaxis()
    axes.legend(loc="upper right")
