"""`ringopt.explain`: what the backend would do on any number of ranks, found in one process without running a graph."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch.export import ExportedProgram

from ringopt.arguments import check_model, count_of
from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.drivers.convert import captured_once, check_convertible, lost_in_export, lowered
from ringopt.drivers.dry_run import DryRun, errors_of_passes
from ringopt.errors import ProgramError, first_line
from ringopt.hardware.devices import Device, device_of, link_of
from ringopt.options import Options, with_defaults
from ringopt.report import Report, bytes_text
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.dynamo import BackendCompilerFailed


def explain(
    model: Any,
    *args: Any,
    world_size: int = 8,
    options: Mapping[str, Any] | Options | None = None,
    hardware: str | None = None,
    **kwargs: Any,
) -> Report:
    """The report of `torch.compile(model, backend="ring")(*args, **kwargs)` on `world_size` ranks, seen from rank 0.

    No process group is needed and no graph is executed: each graph Dynamo captures is transformed, and answered with
    zeros that take no memory. Python between graphs does run; where it cannot go on with zeros, a note says so, and the
    report is of the graphs up to there. Build the model on the meta device to explain one that
    does not fit this machine.

    An ExportedProgram is explained as `ringopt.convert` would take it; it has its inputs already. With `hardware`, a
    name of the table in ringopt/hardware/devices.py such as "h100", strategies are chosen for ranks of that kind, and a
    note holds the memory against theirs. Raises OptionError, ProgramError (inputs beside a program, or one that is
    converted already), and what the model raises.
    """
    count_of("world_size", world_size)
    device = device_of(hardware) if hardware is not None else None
    chosen, mesh = with_defaults(options), PretendedMesh(0, world_size, hardware)
    if not isinstance(model, ExportedProgram):
        check_model(model)
        report = of_model(model, args, kwargs, chosen, mesh)
    elif args or kwargs:
        raise ProgramError("an exported program is explained at the sizes it was exported for; pass no inputs")
    else:
        report = of_program(model, chosen, mesh)
    return report if device is None else dataclasses.replace(report, notes=(*report.notes, held_by(device, report)))


def held_by(device: Device, report: Report) -> str:
    """The memory of a forward and what is sent, against what a device has."""
    held, seconds = sum(report.memory.values()), report.bytes_sent / link_of(device.link).rate
    share = f"{bytes_text(held)} are {held / device.memory:.1%} of the {bytes_text(device.memory)} of {device.name}"
    return f"{share}; what a rank sends takes {seconds * 1e3:.3g} ms of its {device.link}, hidden or not"


def of_program(program: ExportedProgram, options: Options, mesh: Mesh) -> Report:
    """The report of an ExportedProgram, which is not run."""
    check_convertible(program)
    report = lowered(program, captured_once(program), options, mesh).report
    return dataclasses.replace(report, notes=(*report.notes, *lost_in_export(program)))


def of_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, mesh: Mesh) -> Report:
    """The report of a module or function that Dynamo captures with these inputs, as fake tensors; of the graphs before
    it where the program then fails, with a note. Raises what the program raises before its first graph."""
    run, rest = DryRun(options, mesh), list[Report]()
    unlimited = dynamo.patched(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)
    # Every dry run is a compilation; beyond its limit Dynamo would capture nothing, and nothing would be reported.
    with errors_of_passes(), unlimited:
        try:
            run(model, args, kwargs)
        except BackendCompilerFailed:
            raise
        except Exception as error:
            if not run.graphs:
                raise
            rest = [Report(mesh.size, notes=(cut_short(len(run.graphs), error),))]
    if not run.graphs:
        nothing = (
            "Dynamo captured no graph of this model, so nothing would be sharded; TORCH_LOGS=graph_breaks says why"
        )
        return Report(mesh.size, notes=(nothing,))
    return Report.merged([*(made.report for made in run.graphs), *rest], mesh.size)


def cut_short(graphs: int, error: Exception) -> str:
    """Python that reads what a graph gives (a number of tokens, a list of sizes) may not stand zeros."""
    error_line = f"{type(error).__name__}: {first_line(error)}"
    return (
        f"what follows graph {graphs} is not explained: the program between the graphs was given zeros for what they "
        f"give, and ended with {error_line}; `ringopt.reports()` after a real call has all of it"
    )
