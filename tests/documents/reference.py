"""Writes the generated parts of REFERENCE.md anew: `python -m tests.documents.reference`.

They come from the docstrings of the public names, the parsers of the commands, the errors and the passes, so the page
says what the code says; `tests/documents/test_pages.py` compares.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import ringopt
from ringopt import errors
from ringopt.tools.cli import parser
from ringopt.tools.doctor import SETTINGS
from ringopt.tools.passes import listed

PAGE = Path(__file__).parents[2] / "REFERENCE.md"


def python() -> Iterator[str]:
    """Every public name with its signature and the first paragraph of its docstring."""
    for name in ringopt.__all__:
        value = getattr(ringopt, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            yield from (f"**`ringopt.{name}{signature(value)}`**", "", first_paragraph(value), "")


def signature(value: Callable[..., object]) -> str:
    """Of a function, names and defaults; what a class is made with is its own business."""
    if inspect.isclass(value):
        return ""
    parameters = inspect.signature(value).parameters.values()
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain))


def first_paragraph(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def commands() -> Iterator[str]:
    """Every command with its arguments, which argparse would print in other forms by version."""
    for name, command in subcommands(parser()).items():
        yield from (f"### `ringopt {name}`", "", sentence(command.description or ""), "")
        yield from table(("argument", ""), (cells(action) for action in command._actions if action.dest != "help"))
        yield ""


def subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    [found] = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found.choices)


def sentence(description: str) -> str:
    _, _, what = description.partition(": ")
    return f"{what[:1].upper()}{what[1:]}"


def cells(action: argparse.Action) -> tuple[str, str]:
    if isinstance(action, argparse._SubParsersAction):
        return f"`{action.metavar}`", ", ".join(f"`{name}`" for name in action.choices)
    value = f" {action.metavar}" if action.metavar and action.option_strings else ""
    name = ", ".join(action.option_strings) or str(action.metavar)
    return f"`{name}{value}`", (action.help or "") % {"default": action.default}


def raised() -> Iterator[str]:
    """Every error, with what it is beside a RingError and when it is raised."""
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    rows = (
        (f"`{kind.__name__}`", ", ".join(f"`{base.__name__}`" for base in kind.__bases__), " ".join(text.split()))
        for kind in kinds
        for text in [inspect.getdoc(kind) or ""]
    )
    yield from table(("error", "is a", "raised when"), rows)


def passes() -> Iterator[str]:
    rows = (
        (f"`{step['name']}`", step["does"], ", ".join(f"`{name}`" for name in step["options"]), step["lost"])
        for step in listed()
    )
    yield from table(("pass", "does", "options", "may be switched off; lost"), rows)


def environment() -> Iterator[str]:
    yield from table(("variable", "where it is unset"), ((f"`{name}`", what) for name, what in SETTINGS.items()))


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


PARTS = {"python": python, "commands": commands, "environment": environment, "errors": raised, "passes": passes}


def written(page: str) -> str:
    """The page with its generated parts made anew."""
    for name, lines in PARTS.items():
        body = "\n".join(lines()).strip()
        mark = f"<!-- generated: {name} -->"
        before, _, rest = page.partition(mark)
        _, end, after = rest.partition("<!-- end of generated -->")
        page = f"{before}{mark}\n\n{body}\n\n{end}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
