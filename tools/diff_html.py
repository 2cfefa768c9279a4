"""A GraphDiff as one HTML file that needs no network: data as JSON, rows made when a module is opened.

Everything a program names (nodes, modules, source lines) reaches the page as text: the script sets textContent only.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from ringopt.graph.diff import KINDS, Change, GraphDiff

TEMPLATE = "diff_page.html.jinja"


def page(diff: GraphDiff, before: str, after: str) -> str:
    """`before` and `after` are what the two sides are called."""
    source = (files("ringopt.tools") / TEMPLATE).read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    said = {
        "title": f"{before} -> {after}",
        "summary": str(diff),
        "totals": [asdict(diff.before), asdict(diff.after)],
        "kinds": KINDS,
        "changes": [compact(change) for change in diff.changes],
    }
    return template.render(title=said["title"], data=embedded(said))


def compact(change: Change) -> dict[str, Any]:
    """Of a node that nothing happened to, one side is enough."""
    found = asdict(change)
    if change.kind == "same" and not change.is_site:
        found["before"] = None
    return found


def embedded(data: Any) -> str:
    """JSON inside a script element: no text of a program can end the element."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
