"""The one page that all reports share: a shell, a style sheet, and data that scripts draw.

    ringopt/reporting/web/    page.html.jinja, style.css, core.js, and the scripts of each kind of page

Everything that a program names (nodes, modules, source lines) reaches a page as text: jinja escapes it, and scripts set
text only. Pages of one folder are linked from each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ringopt.output.files import write_whole
from ringopt.output.printable import all_printable, printable

# What each kind of page shows, and the scripts that draw it.
GRAPH = ("tree.js", "graph.js", "details.js")
SCRIPTS = {
    "explain": ("mask.js", "strip.js", *GRAPH, "passes.js", "explain.js"),
    "diff": ("mask.js", "strip.js", *GRAPH, "diff.js"),
    "plan": ("mask.js", "lanes.js", "plan.js"),
    "timeline": ("mask.js", "lanes.js", "timeline.js"),
}
KIND = re.compile(r'<meta name="ringopt-page" content="(\w+)">')
LINKS = re.compile(r"<!--pages-->.*?<!--/pages-->", re.DOTALL)
HEAD = 2000  # characters of a page in which its kind stands


def page(kind: str, subject: str, data: Mapping[str, Any], links: Mapping[str, str] | None = None) -> str:
    """`subject` says of what; `links` are the addresses of other pages, by their kinds."""
    how = Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda values: printable(values) if type(values) is str else values,
    )  # fmt: skip
    return how.get_template("page.html.jinja").render(
        kind=kind, subject=subject, title=f"ringopt {kind}: {subject}", links=_anchors(links or {}),
        data=Markup(embedded(data)), scripts=("core.js", *SCRIPTS[kind]), asset=lambda name: Markup(asset(name)),
    )  # fmt: skip


def asset(name: str) -> str:
    """A file of ringopt/reporting/web/."""
    return (files("ringopt.reporting") / "web" / name).read_text(encoding="utf-8").rstrip("\n")


def embedded(data: Any) -> str:
    """JSON inside a script element: no text of a program can end the element."""
    text = json.dumps(all_printable(data), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _anchors(links: Mapping[str, str]) -> Markup:
    safe = {escape(printable(name)): escape(printable(address)) for name, address in links.items()}
    return Markup(" ".join(f'<a href="{address}">{name}</a>' for name, address in safe.items()))


# ---- pages of one folder ---------------------------------------------------------------------------------------------
def write_linked(file: Path, text: str) -> None:
    """With links to the pages of ringopt in its folder, and in them links to it. Raises OSError."""
    write_whole(file, text)
    if not file.is_file():  # a pipe
        return
    kinds = {other: kind for other in sorted(file.resolve().parent.glob("*.html")) if (kind := _kind_of(other))}
    for other in kinds:
        links = {_called(linked, kinds): linked.name for linked in kinds if linked != other}
        content = other.read_text(encoding="utf-8")
        linked = _with_links(content, links)
        if linked != content:
            write_whole(other, linked)


def _with_links(content: str, links: Mapping[str, str]) -> str:
    anchors = f"<!--pages-->{_anchors(links)}<!--/pages-->"
    return LINKS.sub(lambda _found: anchors, content, count=1)


def _called(file: Path, kinds: Mapping[Path, str]) -> str:
    """By its kind, and by its name where there are several of that kind."""
    alone = sum(kind == kinds[file] for kind in kinds.values()) == 1
    return kinds[file] if alone else f"{kinds[file]}: {file.stem}"


def _kind_of(file: Path) -> str:
    """ "" of what is no page of ringopt."""
    try:
        with file.open(encoding="utf-8") as content:
            found = KIND.search(content.read(HEAD))
    except (OSError, UnicodeDecodeError):
        return ""
    return found[1] if found else ""
