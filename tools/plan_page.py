"""A Plan as one HTML file: memory and time by length, all points, one attention on lanes, the formulas."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ringopt.cost.formulas import LEGEND
from ringopt.hardware.devices import device_of
from ringopt.planner.plan import Plan
from ringopt.reporting.page import page
from ringopt.tools.plan_pictures import COLOURS, drawn_attention

LANES = tuple(COLOURS)


def plan_page(plan: Plan, title: str) -> str:
    """`title` says of what."""
    formulas = plan.formulas()
    data = {
        **plan.to_dict(),
        "links": plan.links,
        "limit": device_of(plan.hardware).memory,
        "points": [
            {**asdict(one), "sites": None, "sent": plan.sent(one), "exchange": f"{one.strategies}, {one.layout}"}
            for one in plan.points
        ],
        "fitting": [f"{ranks:,} ranks: {plan.fitting(length)}" for ranks, length in plan.longest.items()],
        "attention": attention(plan),
        "formulas": [[name, str(text)] for name, text in formulas.items()],
        "legend": list(LEGEND) if formulas else [],
    }
    return page("plan", title, data)


def attention(plan: Plan) -> dict[str, Any] | None:
    """The forward of one attention as spans; None where none is exchanged in steps."""
    drawn = drawn_attention(plan)
    if drawn is None:
        return None
    spans = [[span.rank, LANES.index(span.kind), span.label, span.start, span.stop, 0] for span in drawn.spans]
    return {"subtitle": drawn.subtitle, "spans": spans}
