"""`ringopt convert`: an exported program to one that runs on any number of ranks."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringopt.errors import RingError
from ringopt.tools.command import CommandError, console, import_all, json_object

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from torch import Tensor
    from torch.export import ExportedProgram

    from ringopt.report import Report

EXAMPLES = """\
The file that is written runs on one process as before, and under torchrun with the sequence sharded:

  model = ringopt.load("out.pt2").module()       # or: import ringopt.ops, and torch.export.load

A .pt2 file is a program: convert files you trust. Pickled objects other than tensors are not loaded.

examples:
  python -m ringopt.tools.example in.pt2
  ringopt convert in.pt2 out.pt2 --explain
  ringopt convert in.pt2 out.pt2 --force --verify --options '{"layout": "contiguous"}'
"""

# Largest difference of an output that --verify passes, relative to its largest element.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
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
    parser.add_argument("--verify", action="store_true", help="run both on generated inputs and compare")
    parser.add_argument("--allow-empty", action="store_true", help="write the program even if nothing can be sharded")
    parser.add_argument("--force", action="store_true", help="overwrite OUT.pt2")
    parser.add_argument(
        "--import", metavar="MODULE", dest="imports", action="append", default=[], help="import what the file names"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    target = Path(arguments.target)
    check_target(target, arguments.force)
    import_all(arguments.imports)

    from rich.console import Console
    from rich.progress import Progress

    from ringopt.archive import load_with_provenance
    from ringopt.convert import converted

    told = Console(stderr=True)
    with Progress(console=told, transient=True, disable=not told.is_terminal) as progress:
        task = progress.add_task("load", total=4)
        program, made = load_with_provenance(arguments.source)
        if made is not None:
            raise CommandError(f"{arguments.source} was converted already, by ringopt {made['ringopt']}")
        progress.update(task, advance=1, description="convert")
        new, report = converting(arguments, lambda: converted(program, arguments.options, arguments.allow_empty))
        progress.update(task, advance=1, description="verify")
        verdict = verify(program, new) if arguments.verify else ""
        progress.update(task, advance=1, description="save")
        save(new, target, provenance_text(arguments.options, report))
    tell(arguments, report, verdict)
    return 0


def check_target(target: Path, force: bool) -> None:
    if target.is_dir() or not target.parent.is_dir():
        found = "is a folder" if target.is_dir() else f"cannot be written: {target.parent} is no folder"
        raise CommandError(f"{target} {found}")
    if target.exists() and not force:
        raise CommandError(f"{target} exists; --force overwrites it")


def converting(arguments: argparse.Namespace, convert: Any) -> tuple[ExportedProgram, Report]:
    try:
        made: tuple[ExportedProgram, Report] = convert()
        return made
    except RingError as error:
        said = str(error).replace("allow_empty=True", "--allow-empty")
        raise CommandError(f"{arguments.source}: {said}") from None


def provenance_text(options: dict[str, Any], report: Report) -> str:
    from ringopt.convert import provenance

    return json.dumps(provenance(options, report))


def save(program: ExportedProgram, target: Path, provenance: str) -> None:
    """Whole or not at all."""
    import torch

    from ringopt.archive import PROVENANCE

    handle, name = tempfile.mkstemp(suffix=".pt2", dir=target.parent)
    os.close(handle)
    try:
        torch.export.save(program, name, extra_files={PROVENANCE: provenance})
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def tell(arguments: argparse.Namespace, report: Report, verdict: str) -> None:
    if arguments.explain:
        console().print(report)
    for note in report.notes if not arguments.explain else ():
        print(f"note: {note}")
    sharded = sum(site.refusal is None for site in report.sites)
    print(f"{arguments.target}: {sharded} of {len(report.sites)} attention sites sharded{verdict}")


# ---- --verify --------------------------------------------------------------------------------------------------------
def verify(before: ExportedProgram, after: ExportedProgram) -> str:
    """Runs both on the program's example inputs, floating ones drawn anew. Raises CommandError where they differ."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    if before.example_inputs is None:
        raise CommandError("--verify needs example inputs, and the program was saved without them")
    torch.manual_seed(0)
    args, kwargs = tree_map_only(torch.Tensor, drawn, before.example_inputs)
    worst = 0.0
    with torch.no_grad():
        found = [tree_leaves(program.module()(*args, **kwargs)) for program in (before, after)]
    for one, other in zip(*found, strict=True):
        if isinstance(one, torch.Tensor):
            worst = max(worst, distance(one, other))
    return f"; the largest difference of an output is {worst:.1e}"


def drawn(value: Tensor) -> Tensor:
    import torch

    return torch.randn_like(value) if value.is_floating_point() else value.clone()


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to the largest element."""
    if one.shape != other.shape or one.dtype != other.dtype:
        raise CommandError(f"outputs differ: {list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}")
    difference = (one.double() - other.double()).nan_to_num().abs().max().item() if one.numel() else 0.0
    relative = difference / max(one.double().nan_to_num().abs().max().item(), 1e-30) if difference else 0.0
    allowed = TOLERANCE.get(str(one.dtype).removeprefix("torch."), 0.0)
    if relative > allowed or not bool((one.isnan() == other.isnan()).all()):
        raise CommandError(f"outputs differ by {relative:.1e} of the largest element; nothing was written")
    return relative
