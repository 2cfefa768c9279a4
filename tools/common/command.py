"""What the commands share: their error, types of arguments, finding a model by name, where output goes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.errors import meant
from ringopt.output.files import write_whole
from ringopt.output.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

WIDTH = 100  # columns of output that is no terminal


class CommandError(Exception):
    """A command cannot do what was asked. `__cause__` is the exception of the user's own code, if that was it."""


@dataclass(frozen=True)
class Example:
    """A model and the inputs of one call of it."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_example(target: str) -> Example:
    """Calls the factory named `module:factory`, which returns (model, args tuple) or (model, kwargs dict).

    The current folder is searched first, as with `python -m`.
    """
    factory = _factory(target)
    try:
        made = factory()
    except Exception as error:
        raise CommandError(f"{target}() raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise CommandError(f"{target}() returned {type(made).__name__}; expected (model, inputs)")
    model, inputs = made
    if isinstance(inputs, dict):
        return Example(model, (), inputs)
    if isinstance(inputs, tuple):
        return Example(model, inputs, {})
    raise CommandError(f"{target}() returned inputs as {type(inputs).__name__}; expected a tuple or a dict of keywords")


def _factory(target: str) -> Callable[[], Any]:
    name, colon, attribute = target.rpartition(":")
    if not (name and colon and attribute):
        file = "; of a .pt2 file there is `ringopt explain`" if target.endswith(".pt2") else ""
        raise CommandError(f"{target!r} is not of the form module:factory, such as my_models.llama:tiny{file}")
    folder = os.getcwd()
    if name.endswith(".py"):  # the path of a file
        folder, name = str(Path(name).resolve().parent), Path(name).stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except Exception as error:
        # A module that is not there needs no traceback, one that fails inside does.
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        cause = None if absent else error
        raise CommandError(f"cannot import {name!r}: {type(error).__name__}: {error}") from cause
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = "is not callable" if hasattr(module, attribute) else "does not exist"
        functions = [known for known, value in vars(module).items() if callable(value)]
        raise CommandError(f"{target}: {attribute} {found} in {module.__file__}{meant(attribute, functions)}")
    return factory  # type: ignore[no-any-return]


def positive(text: str) -> int:
    """An argument that is a number of ranks, 1 or more (argparse's `type`)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks, 1 or more")
    return int(text)


def natural(text: str) -> int:
    """An argument that is an integer, 1 or more (argparse's `type`)."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def two_or_more(text: str) -> int:
    """An argument that is an integer, 2 or more (argparse's `type`)."""
    if natural(text) < 2:
        raise argparse.ArgumentTypeError("one rank has nobody to exchange with: 2 or more")
    return int(text)


def json_object(text: str) -> dict[str, Any]:
    """An argument that is a JSON object (argparse's `type`)."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f'not JSON: {error}; an example: \'{{"layout": "zigzag"}}\'') from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as \'{{"layout": "zigzag"}}\'')
    return value


def add_trusted(parser: argparse.ArgumentParser) -> None:
    """Adds `--trusted` to a command that reads .pt2 files."""
    parser.add_argument("--trusted", action="store_true", help="read a .pt2 file whatever its size, if you know it")


def import_all(names: Sequence[str]) -> None:
    """Modules that define what a .pt2 file names: operators, classes of outputs."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise CommandError(f"cannot import {name!r}: {type(error).__name__}: {error}") from None


@dataclass
class Shown:
    """What the command line asks for: `quiet`, nothing on standard error but errors; `colour`, where it can be."""

    quiet: bool = False
    colour: bool = True


SHOWN = Shown()


def console() -> Console:
    """Standard output. Where that is no terminal (a log, a pipe), without colour, in 100 columns or as many as COLUMNS
    says: every table fits."""
    from rich.console import Console

    from ringopt.output.plainly import PrintedPlainly

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            """In place of rich's, which ends with 1: of a diff that says that there is a difference."""
            raise BrokenPipeError

    out = Piped(highlight=False, no_color=None if SHOWN.colour else True)
    width = None if os.environ.get("COLUMNS", "").isdecimal() else WIDTH
    if not out.is_terminal:
        out = Piped(highlight=False, width=width, color_system=None)
    out.push_render_hook(PrintedPlainly())
    return out


def progress() -> Progress:
    """On standard error, where that is a terminal and nobody asked for quiet."""
    from rich.console import Console
    from rich.progress import Progress

    stderr = Console(stderr=True, no_color=None if SHOWN.colour else True)
    return Progress(console=stderr, transient=True, disable=SHOWN.quiet or not stderr.is_terminal)


@contextmanager
def working(doing: str) -> Iterator[None]:
    """A bar without an end while something of unknown length goes on, with the time that it has taken."""
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with progress() as bar:
        bar.columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        bar.add_task(doing, total=None)
        yield


def check_file(option: str, path: str | Path | None) -> None:
    """Before any work: raises CommandError where the file could not be written afterwards."""
    if path is None:
        return
    if Path(path).is_dir():
        raise CommandError(f"{option} {path}: it is a folder")
    if not Path(path).parent.is_dir():
        raise CommandError(f"{option} {path}: there is no folder {Path(path).parent}")


def write(path: str | Path, text: str) -> None:
    """A page or a table as a file, whole or not at all."""
    try:
        write_whole(Path(path), printable(text))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


def write_page(path: str | Path, text: str) -> None:
    """A page, linked with the others of its folder."""
    from ringopt.reporting import page

    try:
        page.write_linked(Path(path), printable(text))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
