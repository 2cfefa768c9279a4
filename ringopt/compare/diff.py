"""`ringopt.diff`: two programs, however they are given, as one GraphDiff."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TypeAlias

import torch
import torch.fx as fx
from torch.export import ExportedProgram

from ringopt.arguments import count_of
from ringopt.compare.graph_diff import GraphDiff, diff_views, with_values
from ringopt.compare.node_errors import with_run
from ringopt.compare.node_views import views_of
from ringopt.compare.program_files import FileProgram, Unknown, read_program
from ringopt.compare.program_inputs import Given
from ringopt.compare.trace_files import TraceProgram, is_trace, views_of_trace
from ringopt.errors import ProgramError
from ringopt.frontend.pt2.archive import blamed, load
from ringopt.torch_compat.fake_tensors import FakeTensor

Program: TypeAlias = ExportedProgram | fx.GraphModule


def diff(
    before: Program | str | Path,
    after: Program | str | Path,
    *,
    world_size: int | None = None,
    trusted: bool = False,
    inputs: Given | None = None,
    gradients: bool = True,
) -> GraphDiff:
    """What the two differ in: nodes matched by structure and provenance, and what changed in meaning.

    Each is an ExportedProgram, an fx.GraphModule, the path of a .pt2 file, or of a folder of TORCH_TRACE, of which the
    graphs of one kind are taken ("folder" or "folder#dynamo_output_graph"); ringopt need not have made either.
    `world_size` is the number of ranks to count bytes and FLOPs of rank 0 for, where a graph does not tell its own.
    Values of parameters, buffers and constants are compared too. With `inputs` both programs are run on them, and the
    values of all matched nodes compared: a tuple, or a dict by the names of inputs; a file of torch.save with either;
    or "random", "random:SEED". Then a backward is run too, from random cotangents, and the `gradients` of these nodes
    compared, which are held for all of one program. `trusted` is as in `ringopt.load`. Raises ProgramError, OptionError
    for a `world_size` that is none, and PlanError where the rows of a program are too few for it.
    """
    if world_size is not None:
        count_of("world_size", world_size)
    given = before, after
    programs = [opened(program, trusted, inputs is not None) for program in given]
    views, tensors = [], []
    for source, program in zip(given, programs, strict=True):
        with blamed(source, "compared") if isinstance(source, (str, Path)) else nullcontext():
            views.append(program.views if isinstance(program, TraceProgram) else views_of(program, world_size))
            tensors.append(tensors_of(program))
    found = with_values(diff_views(*views), lambda one, other: differ(tensors[0](one), tensors[1](other)))
    if inputs is None:
        return found
    one, other = (program for program in programs if not isinstance(program, (FileProgram, TraceProgram)))
    return with_run(found, one, other, inputs, gradients)


def opened(
    program: Program | str | Path, trusted: bool = False, runs: bool = False
) -> Program | FileProgram | TraceProgram:
    """The program in a file, or the one that is given; of a file what torch makes of it if it `runs`. Raises
    ProgramError for what is no program."""
    if isinstance(program, (str, Path)):
        folder, _, kind = str(program).partition("#")
        if is_trace(Path(folder)):
            if runs:
                raise ProgramError(f"{folder} is a trace, which cannot be run; leave out inputs")
            return TraceProgram(views_of_trace(Path(folder), kind or None))
        if runs:
            return load(program, trusted=trusted)
        try:
            return read_program(Path(program), trusted)
        except Unknown:
            return load(program, trusted=trusted)
    if not isinstance(program, (ExportedProgram, fx.GraphModule)):
        raise ProgramError(
            f"{type(program).__name__} cannot be compared; expected an ExportedProgram, a GraphModule or a .pt2 file"
        )
    return program


def tensors_of(program: Program | FileProgram | TraceProgram) -> Callable[[str], torch.Tensor | None]:
    """The values that are part of the program, by the name of the node that reads them."""
    known: Mapping[str, object]
    if isinstance(program, TraceProgram):
        known, targets = {}, {}
    elif isinstance(program, FileProgram):
        known, targets = program.stored, program.targets
    elif isinstance(program, ExportedProgram):
        known = {**program.constants, **program.state_dict}
        specs = program.graph_signature.input_specs
        targets = {spec.arg.name: spec.target for spec in specs if spec.target is not None}
    else:
        known = {node.target: _attribute(program, node.target) for node in program.graph.find_nodes(op="get_attr")}
        targets = {node.name: node.target for node in program.graph.find_nodes(op="get_attr")}

    def tensor(name: str) -> torch.Tensor | None:
        value = known.get(targets[name]) if name in targets else None
        return value if isinstance(value, torch.Tensor) else None

    return tensor


def _attribute(module: object, path: str) -> object:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two known values of one shape have different bits; shapes are compared elsewhere."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, FakeTensor) or isinstance(other, FakeTensor) or one.is_meta or other.is_meta:
        return False
    a, b = one.detach().cpu(), other.detach().cpu()
    return not (torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all()))
