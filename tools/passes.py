"""`ringopt passes`: the line of passes, what each does, and what it reads and writes of what they share."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ringopt.tools.common.command import console

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXAMPLES = """\
examples:
  ringopt passes
  ringopt passes --json
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt passes`."""
    parser = commands.add_parser(
        "passes",
        help="the passes in order: what each does, reads and writes, and which may be switched off",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print the line as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    found = listed()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    out = console()
    for step in found:
        optional = f" (may be switched off; lost: {step['lost']})" if step["optional"] else ""
        out.print(f"[bold]{step['name']}[/bold]: {step['does']}{optional}", highlight=False)
        for how in ("options", "reads", "writes"):
            if step[how]:
                out.print(f"  {how} {', '.join(step[how])}", markup=False, highlight=False)
    return 0


def listed() -> list[dict[str, Any]]:
    """In order. What a pass does is the first line of its file."""
    from ringopt.passes import LINE

    return [
        {
            "name": step.name,
            "does": (sys.modules[type(step).__module__].__doc__ or "").partition("\n")[0].rstrip("."),
            "options": [field.name for field in fields(step)],
            "reads": list(step.reads),
            "writes": list(step.writes),
            "optional": step.optional,
            "lost": step.lost,
        }
        for step in LINE
    ]
