"""A GraphDiff as one HTML file: data as JSON, rows made when a module is opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ringopt.compare.graph_diff import KINDS, Change, GraphDiff, as_dict, finite
from ringopt.reporting.page import embedded, filled


def diff_page(diff: GraphDiff, before: str, after: str) -> str:
    """`before` and `after` are what the two sides are called."""
    data = {
        "summary": str(diff),
        "totals": [asdict(diff.before), asdict(diff.after)],
        "kinds": KINDS,
        "metrics": list(metrics_of(diff)),
        "changes": [compact(change) for change in diff.changes],
    }
    return filled("diff", title=f"ringopt diff: {before} -> {after}", data=embedded(data))


def compact(change: Change) -> dict[str, Any]:
    """Of a node that nothing happened to, one side is enough."""
    found = as_dict(change)
    if change.kind == "same" and not change.is_site:
        found["before"] = None
    return found


def metrics_of(diff: GraphDiff) -> Iterator[dict[str, Any]]:
    """What nodes can be coloured by: `values` has one for each change, None where there is none. Errors are listed in
    order of computation, all else by size."""

    known: list[tuple[str, list[float | None], dict[str, bool]]] = []
    if diff.compared:
        errors = [change.error for change in diff.changes]
        known.append(("error, relative", [error.relative if error else None for error in errors], {"error": True}))
        known.append(("error, max abs", [error.largest if error else None for error in errors], {"error": True}))
    for name, numbers in diff.overlays.items():
        known.append((name, [overlaid(change, numbers) for change in diff.changes], {"overlay": True}))
    views = [change.after for change in diff.changes]
    known.append(("bytes sent", [view.bytes_sent if view else None for view in views], {}))
    known.append(("FLOPs", [view.flops if view else None for view in views], {}))
    for name, values, kind in known:
        if kind or any(values):
            yield {"name": name, **kind, "values": [finite(x) if x is not None else None for x in values]}


def overlaid(change: Change, values: Mapping[str, float]) -> float | None:
    """By the name of the node after, else by that before."""
    names = (view.name for view in (change.after, change.before) if view is not None)
    return next((values[name] for name in names if name in values), None)
