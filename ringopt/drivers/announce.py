"""What a user is told of a compilation without asking: in one line what was sharded, or a warning that nothing was.

    ringopt: 4 of 4 attentions, 100% of matrix work on shards, 2 ranks

Dynamo may make several graphs of one call, one of which has all the attention. So it is told when the last of them is
compiled. Where Dynamo does not say which is the last, it is told when one of them is called again, or at exit.
`logging.getLogger("ringopt").setLevel("WARNING")` leaves out the line, "ERROR" the warnings too.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.fx as fx

from ringopt.distributed.mesh import Mesh
from ringopt.errors import RefusedError
from ringopt.options import Options
from ringopt.output.printable import logger, once, summary_logger
from ringopt.report import Report
from ringopt.runtime.graph_boundary import ends_program
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.fake_tensors import FakeTensor
from ringopt.torch_compat.tracing import compilation_of_frame

log = logger(__name__)
lines = summary_logger()

Run = Callable[..., Any]
Say = Callable[[str], None]
LITTLE = 0.9  # of the matrix work on shards: where the rest is, is told


# ---- of one graph ----------------------------------------------------------------------------------------------------
def raise_or_warn(report: Report, options: Options, say: Say = log.warning) -> None:
    """Refusals, as the user asked to hear of them. Without ranks to shard over there is nothing to refuse but to
    dilate. What only looks like attention is told where nothing is sharded: elsewhere its rows may well be."""
    refused = [site for site in report.sites if site.refusal and not site.by_rows]
    reasons = [f"{site.module or 'attention'}: {site.refusal}" for site in refused]
    reasons += [report.refusal] if report.refusal else []
    reasons += report.left_alone if not (report.sites or report.sharded_fraction) else ()
    undilated = [f"{site.module or 'attention'}: {site.not_dilated}" for site in report.sites if site.not_dilated]
    if options.dilates and not report.sites:
        undilated.append(report.refusal or "no attention was found")
    causes = {"not sharded": reasons if report.world_size > 1 else [], "not dilated": undilated}
    message = ". ".join(f"{what}: {'; '.join(dict.fromkeys(why))}" for what, why in causes.items() if why)
    runs = "replicated on every rank" if causes["not sharded"] else "as the model has it"
    refuse(message, f"it runs {runs}", options, say)


def log_report(log: logging.Logger, report: Report) -> None:
    """For TORCH_LOGS="ringopt"."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", report.text(verbose=True))


def heard_once(mesh: Mesh) -> Say:
    """A warning of what all ranks of `mesh` have alike: from the first of them, once in a process."""
    return partial(once, log, logging.WARNING) if mesh.rank == 0 else lambda _sentence: None


def refuse(message: str, otherwise: str, options: Options, say: Say) -> None:
    """Says `message`, if there is one and as option on_refusal has it. Raises RefusedError."""
    if not message or options.on_refusal == "ignore":
        return
    if options.on_refusal == "error":
        raise RefusedError(f'{message}. With on_refusal="warn" {otherwise}')
    say(message)


# ---- of all graphs of a call -----------------------------------------------------------------------------------------
@dataclass
class Program:
    """The graphs of one call that were compiled so far; `speaks`: whether this rank tells of them."""

    options: Options
    speaks: bool
    reports: list[Report] = field(default_factory=list)

    def conclude(self) -> None:
        """Raises RefusedError where nothing is sharded and options ask for it."""
        whole = Report.merged(self.reports, self.reports[0].world_size)
        if not whole.matrix_flops:
            return
        nothing = whole.shards_nothing if not whole.left_alone else ""
        if nothing:
            advice = "Sequences are sharded by the attention that reads them; a model without runs as well on one rank"
            refuse(f"not sharded: {nothing}. {advice}", "it runs so", self.options, self.say(log, logging.WARNING))
        elif whole.world_size > 1:
            self.say(lines, logging.INFO)(summary(whole, len(self.reports)))

    def say(self, log: logging.Logger, level: int) -> Say:
        return partial(once, log, level) if self.speaks else lambda _sentence: None


_open: dict[str, Program] = {}


def announce(gm: fx.GraphModule, report: Report, options: Options, mesh: Mesh, run: Run) -> Run:
    """`run`, compiled of `gm` for the first time; told now if that was the last graph of the program. What is compiled
    again for another length is not told again. Raises RefusedError."""
    if report.world_size == 1 or compilation_of_frame():
        return run
    last = ends_program(gm)
    if last and not dynamo.is_continuation(dynamo.code_being_compiled()):
        Program(options, mesh.rank == 0, [report]).conclude()
        return run
    program = _open.setdefault(mesh.name, Program(options, mesh.rank == 0))
    program.reports.append(report)
    if last:
        conclude(mesh.name)
        return run
    return Awaited(run, mesh.name)


class Awaited:
    """`run`, a graph that others follow. When it is called again, they were compiled."""

    def __init__(self, run: Run, mesh: str) -> None:
        self.run, self.mesh, self.called = run, mesh, False

    def __call__(self, *inputs: Any) -> Any:
        if self.mesh in _open and not any(isinstance(x, FakeTensor) for x in inputs):
            if self.called:
                conclude(self.mesh)
            self.called = True
        return self.run(*inputs)


def conclude(mesh: str) -> None:
    """Of the graphs that were compiled for a mesh so far: they were all of a program."""
    _open.pop(mesh).conclude()


@atexit.register
def conclude_all() -> None:
    """Of what was called once. It is too late for an error."""
    for program in _open.values():
        program.options = replace(program.options, on_refusal="warn")
        program.conclude()
    _open.clear()


def summary(report: Report, graphs: int = 1) -> str:
    """The headline, with where the rest of the work is."""
    most = report.heaviest if report.sharded_fraction < LITTLE else ""
    of = f", {graphs} graphs" if graphs > 1 else ""
    return f"{report.headline}{of}" + (f"; most of what is not, in {most}" if most else "")
