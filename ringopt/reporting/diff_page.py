"""A GraphDiff as one HTML file: what differs layer by layer, attentions with both masks, numbers, and all nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ringopt.compare.graph_diff import Change, GraphDiff, finite
from ringopt.compare.mask_picture import ALL_RANKS, DIGITS, NOTHING
from ringopt.reporting.graph_data import GraphData
from ringopt.reporting.page import page


def diff_page(diff: GraphDiff, before: str, after: str, links: Mapping[str, str] | None = None) -> str:
    """`before` and `after` are what the two sides are called; `links` as in `page`."""
    found = GraphData()
    found.frame("diff", diff.changes)
    data = {
        "summary": str(diff),
        "totals": [asdict(diff.before), asdict(diff.after)],
        "compared": len(diff.compared),
        "gradients": sum(change.gradient is not None for change in diff.changes),
        "metrics": list(metrics_of(diff)),
        "ranks": ranks_drawn(diff),
        "graph": found.data(),
    }
    return page("diff", f"{before} → {after}", data, links)


def ranks_drawn(diff: GraphDiff) -> int:
    """As many as the masks name; 2 where none does."""
    lines = (line for change in diff.sites for line in (change.node.site.ranks if change.node.site else ()))
    named = set("".join(lines)) - {NOTHING, ALL_RANKS}
    return 1 + max((DIGITS.index(digit) for digit in named), default=1)


def metrics_of(diff: GraphDiff) -> Iterator[dict[str, Any]]:
    """What nodes can be coloured by: `values` has one for each change, None where there is none. Errors are listed in
    order of computation, of gradients from the end, all else by size."""

    known: list[tuple[str, list[float | None], dict[str, bool]]] = []
    if diff.compared:
        errors = [change.error for change in diff.changes]
        known.append(("error, relative", [error.relative if error else None for error in errors], {"error": True}))
        known.append(("error, max abs", [error.largest if error else None for error in errors], {"error": True}))
    if any(change.gradient for change in diff.changes):
        slopes = [change.gradient.relative if change.gradient else None for change in diff.changes]
        known.append(("error of the gradient, relative", slopes, {"error": True, "gradient": True}))
    for name, numbers in diff.overlays.items():
        known.append((name, [overlaid(change, numbers) for change in diff.changes], {"overlay": True}))
    views = [change.after for change in diff.changes]
    known.append(("bytes sent", [view.bytes_sent if view else None for view in views], {}))
    known.append(("bytes of results", [view.result_bytes if view else None for view in views], {}))
    known.append(("FLOPs", [view.flops if view else None for view in views], {}))
    for name, values, kind in known:
        if kind or any(values):
            yield {"name": name, **kind, "values": [finite(x) if x is not None else None for x in values]}


def overlaid(change: Change, values: Mapping[str, float]) -> float | None:
    """By the name of the node after, else by that before."""
    names = (view.name for view in (change.after, change.before) if view is not None)
    return next((values[name] for name in names if name in values), None)
