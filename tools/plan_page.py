"""A Plan as one HTML file: the table, the pictures, the formulas."""

from __future__ import annotations

from markupsafe import Markup

from ringopt.cost.choose import duration
from ringopt.cost.formulas import LEGEND
from ringopt.planner.plan import Plan
from ringopt.report import bytes_text, counted
from ringopt.reporting.page import filled


def plan_page(plan: Plan, title: str, picture: str) -> str:
    """`title` says of what; `picture` is an svg element, or "" where none could be drawn."""
    what = "a training step" if plan.training else "a forward"
    return filled(
        "plan", title=f"ringopt plan: {title}", plan=plan, picture=Markup(picture), readable=bytes_text,
        legend=LEGEND if plan.formulas() else (),
        duration=duration, counted=counted, summary=f"{what} per rank, {plan.hardware} over {plan.links}, predicted",
    )  # fmt: skip
