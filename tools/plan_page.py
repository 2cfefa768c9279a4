"""A Plan as one HTML file: memory and time by length, attentions and their masks, all points, one on lanes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ringopt.compare.mask_picture import dilated_picture, picture_of
from ringopt.cost.choose import MOST_RANKS, Case
from ringopt.cost.formulas import LEGEND
from ringopt.errors import OptionError
from ringopt.hardware.devices import device_of
from ringopt.output.drawn import MaskPicture
from ringopt.planner.plan import Plan
from ringopt.reporting.page import page
from ringopt.tools.plan_pictures import COLOURS, FewRanks, drawn_attention, on_few_ranks

LANES = tuple(COLOURS)


def plan_page(plan: Plan, title: str) -> str:
    """`title` says of what."""
    formulas = plan.formulas()
    data = {
        **plan.to_dict(),
        "links": plan.links,
        "limit": device_of(plan.hardware).memory,
        "points": [
            {**asdict(one), "sites": None, "exchange": plan.exchange(one)} for one in plan.points
        ],
        "longest": [[ranks, length, plan.cap(length)] for ranks, length in plan.longest.items()],
        "sites": list(sites(plan)),
        "attention": attention(plan),
        "formulas": [[name, str(text)] for name, text in formulas.items()],
        "legend": list(LEGEND) if formulas else [],
    }
    return page("plan", title, data)


def sites(plan: Plan) -> Iterator[dict[str, Any]]:
    """Each attention once for each exchange of it that was chosen, drawn at the longest of its points."""
    for number, site in enumerate(plan.traced.sites):
        chosen: dict[tuple[str, str], list[int]] = {}
        for place, point in enumerate(plan.points):
            made = point.sites[number]
            chosen.setdefault((made.strategy, made.layout), []).append(place)
        for (strategy, layout), places in chosen.items():
            few = on_few_ranks(plan, plan.points[places[-1]], number)
            picture = mask_of(few, layout)
            each = [plan.points[place].sites[number] for place in places]
            yield {
                "modules": site.modules, "times": site.times, "pattern": few.case.pattern, "strategy": strategy,
                "layout": layout, "which": few.which, "picture": asdict(picture) if picture else None,
                "points": [
                    [place, one.bytes, one.flops, one.seconds, one.exposed]
                    for place, one in zip(places, each, strict=True)
                ],
            }  # fmt: skip


def mask_of(few: FewRanks, layout: str) -> MaskPicture | None:
    """Who computes what, where so many ranks can be unrolled."""
    case, rows = few.case, few.case.q_length
    if not isinstance(case, Case):
        return dilated_picture(case.pattern, rows, case.heads.q_heads)
    try:
        plan = case.plan(few.ranks, layout, few.strategy) if 1 < few.ranks <= MOST_RANKS else None
    except OptionError:
        plan = None
    return picture_of(case.pattern, case.mask, rows, case.kv_length, plan)


def attention(plan: Plan) -> dict[str, Any] | None:
    """The forward of one attention as spans; None where none is exchanged in steps."""
    drawn = drawn_attention(plan)
    if drawn is None:
        return None
    spans = [[span.rank, LANES.index(span.kind), span.label, span.start, span.stop, 0] for span in drawn.spans]
    return {"subtitle": drawn.subtitle, "spans": spans}
