"""`torch.compile(model, backend="ring")`: found through the entry point group `torch_dynamo_backends`.

The object under the entry point is a plain function, and nothing here registers it: torch refuses a name that comes
twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import torch
import torch.fx as fx

from ringopt.distributed.consistency import digest
from ringopt.distributed.mesh import Mesh
from ringopt.drivers.announce import announce, heard_once, log_report, raise_or_warn
from ringopt.drivers.compile import Run, for_these_sizes, in_order, mesh_for, transform, warn_of_limit
from ringopt.drivers.compiled import Compiled
from ringopt.drivers.reference import reference
from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.errors import first_line
from ringopt.frontend.data_sizes.assertions import Asserted, take_assertions
from ringopt.frontend.data_sizes.gradients import gradients_where_taken, take_conditions
from ringopt.frontend.data_sizes.traced_again import (
    on_ranks,
    trace_with_breaks,
    trace_with_sizes,
    traces_sizes,
)
from ringopt.frontend.dynamic_shapes import shape_env_of, specialize
from ringopt.frontend.higher_order.associative_scan import (
    keeps_associative_scans,
    trace_as_written,
)
from ringopt.frontend.higher_order.scan import leave_loops
from ringopt.frontend.interpolation import copy_where_sizes_stay
from ringopt.frontend.loops.rolled import rolls_loops, trace_loops_as_written
from ringopt.frontend.open_floats import left_open
from ringopt.ir.checkpoint_regions import police, tags_of
from ringopt.ir.nodes import op_name, readable_name
from ringopt.ops import operators
from ringopt.ops.ring import VERSION
from ringopt.options import Options, with_defaults
from ringopt.output.printable import logger
from ringopt.overlap.async_collectives import Budget
from ringopt.report import Report
from ringopt.runtime.crossing import remembering
from ringopt.runtime.graph_boundary import Boundary
from ringopt.runtime.input_check import CheckedInputs, Compared, Places, call_of
from ringopt.runtime.mask_guards import Made, Watched
from ringopt.runtime.trace import trace_to, with_trace
from ringopt.runtime.verify import Original, Verified
from ringopt.runtime.verify_nodes import NodeCheck
from ringopt.tensor.lazy import Lazy
from ringopt.torch_compat import inductor
from ringopt.torch_compat.autograd import autocast_is_on, no_autocast, unseen
from ringopt.torch_compat.dynamo_attributes import followed_by, with_attributes_as_inputs
from ringopt.torch_compat.fake_tensors import DataDependentOutputException
from ringopt.torch_compat.symbolic_shapes import GuardOnDataDependentSymNode

log = logger(__name__)

_reports: list[Report] = []

teach_dynamo()  # before Dynamo traces: it looks the backend up first


def reports() -> list[Report]:
    """The reports of the graphs compiled so far in this process, oldest first."""
    return list(_reports)


def note(report: Report) -> None:
    """For `reports`, and in the log."""
    _reports.append(report)
    log_report(log, report)


@traces_sizes(on_ranks)
@keeps_associative_scans
@rolls_loops
def ring(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Run:
    """The backend. `options` are those of `ringopt.Options`, `mode` is Inductor's. What `options` leave open is as
    `ringopt.defaults` and the environment say.

    Raises OptionError, RefusedError (with on_refusal="error"), and at the first call RingMismatchError.
    """
    chosen = with_defaults(options)
    gm, held = with_attributes_as_inputs(gm)
    example_inputs = [*example_inputs, *held]
    mesh = mesh_for(chosen, example_inputs)
    copy_where_sizes_stay(gm)
    asserted = take_assertions(gm)
    conditions = take_conditions(gm, trace_with_sizes(gm, mesh.size))
    names = [readable_name(node.name) for node in gm.graph.find_nodes(op="placeholder")]
    called = [node.target for node in gm.graph.nodes if node.op.startswith("call")]
    operators = dict(Counter(getattr(target, "__name__", str(target)) for target in called))
    mesh.recent.folder = chosen.dump or mesh.recent.folder
    # Ranks may have their inputs in another order yet, so what is told of them has none.
    called_with = digest(repr(sorted(operators.items())).encode())
    given = sorted(example_inputs, key=lambda x: f"{getattr(x, 'shape', x)} {getattr(x, 'dtype', '')}")
    mesh.stands(call_of("compiles a graph", called_with, given, operators), publish=True)
    original = Original(gm, names) if chosen.verify else None

    def make(inputs: Sequence[Any], anew: bool) -> Made:
        made, run = compiled(gm, inputs, chosen, mesh, mode, anew)
        if made.left or any(isinstance(x, Lazy) for x in inputs):
            run = Boundary(run, made.given, made.left, made.symbols)
        if made.program is not None and made.order is not None and mesh.size > 1:
            places = Places(made.order.inputs, made.batch, made.local)
            compared = Compared(made.program, places, names, bool(made.draws_random), operators)
            run = CheckedInputs(run, mesh, compared, chosen.check_inputs)
        if made.graph is not None and chosen.trace is not None:
            run = with_trace(run, trace_to(chosen.trace, mesh.rank), made.report.sites)
        run = remembering(made.around.around(run), made.gathered)
        if original is not None:
            if made.drawn:
                alike = reference(gm, inputs, chosen, made.drawn)
                original.drawn_by_position(alike.program, alike.found)
            nodes = None
            if made.pairs is not None:
                nodes = NodeCheck(made.pairs, mesh, {**made.left, **made.local}, made.averaged, frozenset(made.given))
            run = Verified(run, original, mesh, made.local, made.averaged, nodes)
        if not anew:
            run = announce(gm, made.report, chosen, mesh, run)
        return run, made.relied_on, made.claims

    watched = Watched(make, example_inputs)
    run = gradients_where_taken(watched if watched.seen else watched.run, conditions)
    return followed_by(Asserted(run, asserted) if asserted else run, held)


def compiled(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: Options,
    mesh: Mesh,
    mode: str | None,
    anew: bool,
    for_number: str = "",
) -> tuple[Compiled, Run]:
    """What the passes make of `gm`, which is noted, and that by the inner compiler. Where this one asks for a number
    that ranks leave open (of the rows that each has), on all of them, the graph is for the sizes at hand, `for_number`.
    """
    with unseen():
        made = transform(gm, inputs, options, mesh, anew)
    made = for_these_sizes(made, for_number) if for_number else made
    if made.graph is None and not anew:
        trace_as_written()
        trace_loops_as_written(gm, "its graph stays as it is")
        trace_with_breaks(gm)
    if made.graph is not None and not anew:
        leave_loops(made.graph)
    note(made.report)
    raise_or_warn(made.report, options, heard_once(mesh))
    if not anew:
        warn_of_limit(made.report, options)
    compiler = partial(inner, options=options, mode=mode, budget=made.budget)
    learns = made.graph is not None and learns_in_part(gm)
    try:
        explicit = made.graph is not None and autocast_is_on()
        with left_open(gm), torch.set_grad_enabled(torch.is_grad_enabled() or learns):
            with no_autocast() if explicit else nullcontext():
                run = in_order(made.graph or gm, made.order, made.examples(inputs), compiler)
            run = without_autocast(run) if explicit else run
            return made, torch.enable_grad()(run) if learns else run
    except DataDependentOutputException as asked:  # a number that Dynamo knows (`F.one_hot(x, n)` of a tensor n)
        if made.graph is not None:
            raise
        log.warning("a graph that is not sharded is run as it is, for no compiler can: %s", first_line(asked))
        return made, gm
    except GuardOnDataDependentSymNode as asked:
        if for_number or anew or made.graph is None or shape_env_of(gm) is None:
            raise
        specialize(gm)
        _reports.pop()
        why = f"the compiler behind ringopt asks for a number: {first_line(asked)}"
        return compiled(gm, inputs, options, mesh, mode, anew, why)


def without_autocast(run: Run) -> Run:
    """What the passes make of a program has its casts written out, so that autocast around it would cast what the
    program excepts from it (`torch.autocast(..., enabled=False)`)."""

    @wraps(run)
    def alone(*inputs: Any) -> Any:
        with no_autocast():
            return run(*inputs)

    return alone


def learns_in_part(gm: fx.GraphModule) -> bool:
    """Whether a program that is called under no_grad enables gradients for a part of it. What the passes make of it has
    no such parts: it detaches where there is no gradient."""
    switches = (node for node in gm.graph.nodes if op_name(node) == "_set_grad_enabled")
    return not torch.is_grad_enabled() and any(node.args[0] for node in switches)


def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None, budget: Budget) -> Run:
    """`gm` by the compiler that option `inner_backend` names."""
    run: Run = gm
    if options.inner_backend != "eager":
        police(gm)
    if options.inner_backend == "aot_eager":
        from ringopt.overlap.start_early import early_aot_eager

        run = early_aot_eager(gm, example_inputs, budget)
    elif options.inner_backend == "inductor":
        from ringopt.overlap.start_early import inductor_settings

        patches = {**(inductor.list_mode_options(mode) if mode else {}), **inductor_settings(gm, budget)}
        patches |= without_cpp_wrapper(gm)
        if gm.graph.find_nodes(op="call_function", target=operators.seeds.default):
            patches |= inductor.hash_settings()
        # Compiled code is cached by the text of a graph, in which our operators are names: what they do is not in it,
        # nor what is computed again in the backward.
        tag = f"{torch.compiler.config.cache_key_tag} ringopt {VERSION} {tags_of(gm)}"
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            run = inductor.compile_fx(gm, example_inputs, patches)
    return run


def without_cpp_wrapper(gm: fx.GraphModule) -> dict[str, Any]:
    """Settings for a graph with operators of ringopt's, where the program has Inductor's `cpp_wrapper` on: its code
    crashes the process at an operator that returns a list of one tensor (torch 2.13)."""
    ours = any(getattr(node.target, "namespace", "") == "ringopt" for node in gm.graph.nodes)
    if not ours or not inductor.setting("cpp_wrapper"):
        return {}
    log.warning("cpp_wrapper is off for a graph with operators of ringopt's, at which Inductor's C++ crashes")
    return {"cpp_wrapper": False}
