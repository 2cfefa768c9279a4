"""What the pages share: templates, and data inside them.

Everything that a program names (nodes, modules, source lines) reaches a page as text: jinja escapes it, and scripts set
textContent only.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from ringopt.output.printable import all_printable, printable


def filled(template: str, **values: Any) -> str:
    """The page made from `ringopt/reporting/TEMPLATE.html.jinja`."""
    how = Environment(
        loader=FunctionLoader(_template), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda values: printable(values) if type(values) is str else values,
    )  # fmt: skip
    return how.get_template(template).render(**values)


def _template(template: str) -> str:
    return (files("ringopt.reporting") / f"{template}.html.jinja").read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """JSON inside a script element: no text of a program can end the element."""
    text = json.dumps(all_printable(data), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
