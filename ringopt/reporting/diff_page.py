"""A GraphDiff as one HTML file: data as JSON, rows made when a module is opened."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ringopt.compare.graph_diff import KINDS, Change, GraphDiff
from ringopt.reporting.page import embedded, filled


def diff_page(diff: GraphDiff, before: str, after: str) -> str:
    """`before` and `after` are what the two sides are called."""
    data = {
        "summary": str(diff),
        "totals": [asdict(diff.before), asdict(diff.after)],
        "kinds": KINDS,
        "changes": [compact(change) for change in diff.changes],
    }
    return filled("diff", title=f"ringopt diff: {before} -> {after}", data=embedded(data))


def compact(change: Change) -> dict[str, Any]:
    """Of a node that nothing happened to, one side is enough."""
    found = asdict(change)
    if change.kind == "same" and not change.is_site:
        found["before"] = None
    return found
