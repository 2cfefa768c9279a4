"""A Report as one HTML file: the model layer by layer, attentions with their masks and strategies, modules, memory; and
the graph after each pass, where histories of it are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringopt.report import Report, drawn_by
from ringopt.reporting.history import History
from ringopt.reporting.page import page


@drawn_by
def report_page(
    report: Report, title: str, histories: Sequence[History] = (), links: Mapping[str, str] | None = None
) -> str:
    """`title` says of what; `links` are the addresses of other pages, by their kinds."""
    graphs = [history.data() for history in histories if history.finished]
    return page("explain", title, {"report": report.to_dict(), "graphs": graphs}, links)
