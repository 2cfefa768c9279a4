"""`ringopt convert`: an exported program to one that runs on any number of ranks."""

from __future__ import annotations

import argparse
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.errors import RingError
from ringopt.tools.common.command import CommandError, add_trusted, console, import_all, json_object, positive, progress
from ringopt.tools.verify import MOST, verify

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from torch.export import ExportedProgram

    from ringopt.report import Report

EXAMPLES = """\
The file that is written runs on one process as before, and under torchrun with the sequence sharded:

  model = ringopt.load("out.pt2").module()       # or: import ringopt.ops, and torch.export.load

Nothing of a file is run but with --verify, which runs its operators. Pickled objects and other code are refused.

examples:
  python -m ringopt.tools.example in.pt2
  ringopt convert in.pt2 out.pt2 --explain
  ringopt convert in.pt2 out.pt2 --force --verify --world-size 2 --options '{"layout": "contiguous"}'
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `ringopt convert`."""
    parser = commands.add_parser(
        "convert",
        help="make an exported program run on any number of ranks",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="IN.pt2", help="file of torch.export.save")
    parser.add_argument("target", metavar="OUT.pt2", help="file to write")
    parser.add_argument("--options", metavar="JSON", type=json_object, default={}, help="options of the backend")
    parser.add_argument("--explain", action="store_true", help="print the report")
    parser.add_argument("--verbose", action="store_true", help="with --explain: every site, value and note")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="run both on generated inputs and compare outputs, what is written, and gradients",
    )
    parser.add_argument(
        "--world-size", metavar="N", type=positive, help="with --verify: on 1 to N processes here (default: 1)"
    )
    parser.add_argument("--allow-empty", action="store_true", help="write the program even if nothing can be sharded")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.pt2")
    parser.add_argument(
        "--import", metavar="MODULE", dest="imports", action="append", default=[], help="import what the file names"
    )
    add_trusted(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.target)
    _check_target(target, arguments.force)
    _check_ranks(arguments.world_size, arguments.verify)
    import_all(arguments.imports)

    from ringopt.drivers.convert import convert_program
    from ringopt.frontend.pt2.archive import load_with_provenance

    ranks = arguments.world_size or 1
    with partial_file(target) as file, progress() as bar:
        task = bar.add_task("load", total=3 + (ranks if arguments.verify else 0))

        def done(following: str = "verify") -> None:
            bar.update(task, advance=1, description=following)

        program, made = load_with_provenance(arguments.source, trusted=arguments.trusted)
        if made is not None:
            raise CommandError(f"{arguments.source} was converted already, by ringopt {made['ringopt']}")
        done("convert")
        new, report = _converting(arguments, lambda: convert_program(program, arguments.options, arguments.allow_empty))
        done("save")
        with _writing(target):
            save(new, file, _provenance_text(arguments.options, report))
        done()
        verdict = verify(program, file, ranks, arguments.imports, done) if arguments.verify else ""
        with _writing(target):
            os.replace(file, target)
    _print_summary(arguments, report, verdict)
    return 0


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir() or not target.parent.is_dir():
        found = "is a folder" if target.is_dir() else f"cannot be written: {target.parent} is no folder"
        raise CommandError(f"{target} {found}")
    if target.suffix != ".pt2":
        raise CommandError(f"{target} does not end in .pt2, as files of programs do")
    if target.exists() and not target.is_file():
        raise CommandError(f"{target} is a device or a pipe; a program is written to a file")
    if target.exists() and not force:
        raise CommandError(f"{target} exists; --force overwrites it")


def _check_ranks(ranks: int | None, verifies: bool) -> None:
    if ranks and not verifies:
        raise CommandError("--world-size tells --verify on how many ranks to run; the file itself serves any number")
    if ranks and ranks > MOST:
        raise CommandError(f"--world-size {ranks}: --verify starts as many processes here; take {MOST} or fewer")


def _converting(arguments: argparse.Namespace, convert: Any) -> tuple[ExportedProgram, Report]:
    from ringopt.frontend.pt2.archive import blamed

    try:
        with blamed(arguments.source, "converted"):
            made: tuple[ExportedProgram, Report] = convert()
        return made
    except RingError as error:
        sentence = str(error).replace("allow_empty=True", "--allow-empty")
        raise CommandError(f"{arguments.source}: {sentence}") from None


def _provenance_text(options: dict[str, Any], report: Report) -> str:
    from ringopt.drivers.convert import provenance

    return json.dumps(provenance(options, report))


@contextmanager
def partial_file(target: Path) -> Iterator[Path]:
    """A file in the folder of `target`, to take its place whole or not at all."""
    file = target.with_name(f".{target.stem}-{os.getpid()}.pt2")
    try:
        with _writing(target):
            file.touch()
        yield file
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{target} cannot be written: {error.strerror}") from None


class Outlet(io.FileIO):
    """A file whose first error is kept for `check`: torch ends the process where a write fails."""

    lost: OSError | None = None

    def write(self, content: Any) -> int:
        left = memoryview(content)
        try:
            while left and self.lost is None:
                left = left[super().write(left) :]
        except OSError as error:
            self.lost = error
        return len(content)

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost


def save(program: ExportedProgram, file: Path, provenance: str) -> None:
    """Raises OSError."""
    import torch

    from ringopt.frontend.pt2.archive import PROVENANCE

    with Outlet(file, "w") as out:
        torch.export.save(program, out, extra_files={PROVENANCE: provenance})
        out.check()


def _print_summary(arguments: argparse.Namespace, report: Report, verdict: str) -> None:
    if arguments.explain:
        console().print(report.rich() if arguments.verbose else report)
    sharded = sum(site.refusal is None for site in report.sites)
    print(f"{arguments.target}: {sharded} of {len(report.sites)} attention sites sharded{verdict}")
