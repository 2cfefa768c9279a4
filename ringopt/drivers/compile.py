"""From Dynamo's graph to the one that is compiled in its place, by value: what becomes of it is one `Compiled`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.fx as fx
from torch import Tensor

from ringopt.calls import AttentionCall
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.distributed.lookup import mesh_of, process_mesh
from ringopt.distributed.mesh import Mesh
from ringopt.drivers.any_sizes import is_much_whole, may_be_fixed, saves_work
from ringopt.drivers.compiled import Compiled
from ringopt.drivers.counterparts import Snapshot
from ringopt.drivers.failing import Failure, agreed, all_want, failure_of, is_passed_on
from ringopt.errors import RefusedError, first_line
from ringopt.expr.sizes import KnownSizes
from ringopt.frontend.capture import Captured, capture
from ringopt.frontend.data_sizes.stretches import has_picks, without_picks
from ringopt.frontend.dtensors.local_graph import has_dtensors, meshes_of_dtensors
from ringopt.frontend.dtensors.other_meshes import why_not_across
from ringopt.frontend.dynamic_shapes import OpenSizes, shape_env_of, specialize, with_sizes_at_hand
from ringopt.frontend.flatten import has_custom
from ringopt.frontend.open_floats import floats_as_tensors
from ringopt.ir.io_order import Order, Reordered
from ringopt.ir.nodes import draws, readable_name, requires_grad, shape_of, value_of
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ops import operators
from ringopt.options import Options
from ringopt.output.printable import logger, once, summary_logger
from ringopt.passes import UNDERSTAND, chosen_line, switched_off
from ringopt.pipeline import Callback, Context, Pass, Pipeline
from ringopt.report import Report
from ringopt.reporting.dump import Dump
from ringopt.reporting.figures import MatrixWork, report_of, with_place
from ringopt.rules.plugins import load_rules
from ringopt.runtime.crossing import note_of_cuts, rows_of_earlier
from ringopt.runtime.graph_boundary import arriving, break_after, check_arrivals, ends_program
from ringopt.scans.call import is_scan
from ringopt.sharding.input_writes import has_copies
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.fake_tensors import faked_in_order
from ringopt.torch_compat.symbolic_shapes import GuardAsked, without_guards
from ringopt.torch_compat.tracing import compilation_of_frame

log = logger(__name__)

Run = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[Any]], Run]

# Steps in which no rank knows which it is: what fails there fails on all.
ALIKE = frozenset(("capture", *(step.name for step in UNDERSTAND)))


# In which launchers say how many processes there are: torchrun and others; mpirun; MPI by PMI; a step of srun.
SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def mesh_for(options: Options, inputs: Sequence[Any]) -> Mesh:
    """The mesh that options name, else the default process group, else a mesh of this process alone. Its ranks meet on
    the device of the `inputs`. Says where it is alone, and warns if it was launched as one of several."""
    if options.mesh is None and not (dist.is_available() and dist.is_initialized()):
        launched = next((name for name in SIZES if os.environ.get(name, "1") not in ("", "1")), None)
        if launched is not None:
            once(
                log,
                logging.WARNING,
                f"compiled for this process alone, which was launched as one of {os.environ[launched]} ({launched}): "
                "torch.distributed is not initialized. Call torch.distributed.init_process_group before the model is "
                "first called",
            )
        else:
            once(
                summary_logger(),
                logging.INFO,
                "one process, so nothing is sharded: start the script with torchrun --nproc-per-node N, and call "
                "torch.distributed.init_process_group before the model is first called",
            )
        return mesh_of("pretend:0/1")
    mesh = process_mesh(options.mesh, options.timeout)
    devices = [x.device for x in inputs if isinstance(x, Tensor) and x.device.type not in ("cpu", "meta")]
    if devices:
        mesh.meet_on(devices[0])
    return mesh


def transform(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh, anew: bool = False
) -> Compiled:
    """What becomes of `gm`. Made `anew`, when Dynamo takes no more guards, it is a graph for the sizes of
    `example_inputs` only. Where a pass fails, `gm` itself is best, on all ranks alike (ringopt/drivers/failing.py)."""
    if "local" in (options.inputs, options.outputs) and not ends_program(gm):
        options = replace(options, outputs="lazy")  # what crosses a graph break is what the program says it is
    if mesh.size == 1 and has_dtensors(gm):
        note = "holds DTensors, and one process has no sequence to share: the graph runs as it was"
        return Compiled(None, Report(1, notes=(note,)))
    if mesh.size == 1 and not (anew or options.dilates or has_custom(gm)) and shape_env_of(gm) is not None:
        return transform_open(gm, example_inputs, options, mesh)
    made = attempted(gm, example_inputs, options, mesh, anew)
    if isinstance(made, Failure) and not anew and shape_env_of(gm) is not None:
        specialize(gm)  # other sizes compile other graphs
        why, made = made.sentence, attempted(gm, example_inputs, options, mesh)
        if not isinstance(made, Failure):
            return for_these_sizes(made, why)
    if isinstance(made, Failure):
        return Compiled(None, refused(made.refusal, options, mesh, Dump(options, mesh.rank)))
    if anew or not may_be_fixed(gm, example_inputs, mesh):
        return made
    return best_sizes(gm, example_inputs, options, mesh, made)


def best_sizes(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh, made: Compiled
) -> Compiled:
    """`made`, which is for any sizes, or a graph for those at hand, where that leaves much less whole: of the ranks all
    have the same. (What is not spread, a rank may compile by itself.)"""
    much = is_much_whole(made.work, mesh.size)
    if not (much if made.program is None else all_want(mesh, much)):
        return made
    fixed = attempted(gm, with_sizes_at_hand(example_inputs), options, mesh, anew=True)
    if isinstance(fixed, Failure) or fixed.program is None:
        return made
    if not all_want(mesh, saves_work(fixed.work, made.work, mesh.size)):
        return made
    specialize(gm)
    fixed = attempted(gm, example_inputs, options, mesh)
    why = "for any, every rank would have more of it whole"
    return made if isinstance(fixed, Failure) else for_these_sizes(fixed, why)


def for_these_sizes(made: Compiled, why: str) -> Compiled:
    """What another length compiles again, and why."""
    notes = (*made.report.notes, f"compiled for these sizes only: {why}")
    return replace(made, report=replace(made.report, notes=notes))


def transform_open(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh) -> Compiled:
    """`transform` on one process, of a graph with open sizes: one graph serves all lengths that the inner compiler's
    own would serve, or `gm` stays as it is."""
    shape_env = shape_env_of(gm)
    assert shape_env is not None
    try:
        with without_guards(shape_env, follows=lambda expr: KnownSizes.of(shape_env).decide(expr) is not None):
            made = attempted(gm, example_inputs, options, mesh)
    except GuardAsked as asked:
        found = draws_here(gm, example_inputs, options)
        if isinstance(found, str):
            return Compiled(None, refused(found, options, mesh, Dump(options, mesh.rank)))
        if found:  # as many ranks draw, so does one process
            specialize(gm)
            return for_these_sizes(transform(gm, example_inputs, options, mesh), first_line(asked))
        note = f"sizes are open, and one process gains nothing from fixing them: {first_line(asked)}"
        return Compiled(None, Report(1, notes=(note,)))
    if isinstance(made, Failure):
        return Compiled(None, refused(made.refusal, options, mesh, Dump(options, mesh.rank)))
    return made


def attempted(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh, anew: bool = False
) -> Compiled | Failure:
    """What `transform` gives; a Failure on all ranks where a pass fails on one of them."""
    context = Context(options, mesh)
    failure: Failure | None = None
    try:
        made = passed_through(gm, example_inputs, context, anew)
    except Exception as error:
        if is_passed_on(error):
            raise
        failure = failure_of(error, context.step)
    # Ranks that have nothing to spread may well compile by themselves: they are not waited for.
    if context.step not in ALIKE and (context.shards if context.spreads is None else context.spreads):
        failure = agreed(mesh, failure)
    return made if failure is None else failure


def passed_through(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context, anew: bool) -> Compiled:
    """`transform`, as far as nothing fails."""
    options, mesh, sizes = context.options, context.mesh, OpenSizes(gm)
    given = arriving(example_inputs, mesh)
    if not anew:
        floats_as_tensors(gm)
        # Rows arrive as they were cut: of one length. A custom backward is a graph for one length, and one process
        # keeps no sizes open.
        if given or has_custom(gm) or has_dtensors(gm) or has_picks(gm) or (options.dilates and mesh.size == 1):
            specialize(gm)
    shape_env = shape_env_of(gm) if not anew else None
    dump, snapshot = Dump(options, mesh.rank), Snapshot(options.verify == "nodes")

    def begin() -> Captured:
        refuse_other_meshes(gm, mesh)
        made = capture(without_picks(gm), example_inputs, shape_env)
        flat = made.begin(context)
        sizes.passed("capture")
        inputs = flat.graph.find_nodes(op="placeholder")
        context.given = {inputs[i]: where for i, where in given.items()}
        context.cuts = rows_of_earlier(inputs, example_inputs, mesh)
        return made

    def passed(step: Pass, gm: fx.GraphModule) -> None:
        sizes.passed(step.name)
        dump.passed(step, gm, context)
        snapshot.passed(step, gm, context)

    made = line_of_passes(begin, context, dump, passed)
    if isinstance(made, Report):
        return Compiled(None, made)
    context.step = "report"
    check_arrivals(context, context.inputs)
    context.notes += sizes.notes if shape_env is not None else ()
    if mesh.size > 1:
        context.notes += break_after(gm, context.gathers, len(context.left) if options.outputs == "lazy" else 0)
        context.notes += [*note_of_cuts(context.cuts), *([mesh.remark] if mesh.remark else [])]
    report, work = report_of(made.graph.graph, context), MatrixWork.of(made.graph.graph, mesh.size, context.gathers)
    dump.done(report, made.graph)
    taken = ((node, info) for node, info in context.sites.items() if info.refusal is None)
    sites = [(node, info) for node, info in taken if mesh.size > 1 or gains_alone(node, info)]
    left = any(map(is_scan, made.graph.graph.nodes))  # those that no ranks share
    scans = any(info.refusal is None for info in context.scans.values()) or (mesh.size == 1 and left)
    if sites or scans or context.given or context.pairs or context.cuts or context.mixed:
        return replace(Compiled.of(made, report, context), pairs=snapshot.counterparts(made.graph, context), work=work)
    if context.drawn or context.improved or left or has_copies(made.graph.graph):  # nothing is spread, or compared
        return replace(Compiled.of(made, report, context), program=None, work=work)
    return Compiled(None, report, work=work)


def refuse_other_meshes(gm: fx.GraphModule, mesh: Mesh) -> None:
    """Raises GraphRefused for DTensors over ranks that have other tokens than this one: what they send each other would
    be of different tokens."""
    for other, node in meshes_of_dtensors(gm).items():
        if why := why_not_across(mesh, other):
            sentence = (
                f"{readable_name(node.name)} is a DTensor over ranks {other.mesh.flatten().tolist()}, and {why}: make "
                'both meshes of one, init_device_mesh(device, (cp, tp), mesh_dim_names=("cp", "tp"))'
            )
            raise GraphRefused(Refusal(sentence, node))


def draws_here(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> bool | str:
    """Whether random numbers are to be drawn by position, which one process does as many ranks do; or why the graph is
    refused. It is looked at for the sizes at hand, without a guard."""
    if options.random == "torch":
        return False
    try:
        return any(map(draws, capture(gm, with_sizes_at_hand(example_inputs)).graph.graph.nodes))
    except GraphRefused as problem:
        return with_place(problem.refusal)
    except Exception as error:
        if is_passed_on(error):
            raise
        return failure_of(error, "capture").refusal


def line_of_passes(
    begin: Callable[[], Captured], context: Context, dump: Dump, passed: Callback, logged: bool = True
) -> Captured | Report:
    """What `begin` gives, which fills the context with what is known, its graph after all passes; the report alone
    where it is refused as a whole."""
    steps = chosen_line(context.options, context.mesh.size)
    context.notes += [*switched_off(context.options), *load_rules()]
    try:
        made = begin()
        flat = made.graph
        context.inputs = flat.graph.find_nodes(op="placeholder")
        dump.captured(flat, context)
        Pipeline(steps, passed, logged).run(flat, context)
    except GraphRefused as problem:
        return refused(with_place(problem.refusal), context.options, context.mesh, dump)
    return made


def refused(why: str, options: Options, mesh: Mesh, dump: Dump) -> Report:
    """The report of a graph that stays as it was."""
    report = report_of(fx.Graph(), Context(options, mesh), why)
    dump.done(report, None)
    return report


def gains_alone(node: fx.Node, info: SiteInfo) -> bool:
    """On one process: whether SDPA takes the place of products written out, or of SDPA with a mask that is needless; or
    whether weights are dropped, which are to be the same as on many ranks; or flex_attention whose backward the CPU
    lacks; or whether it is dilated, which is for the options to say and not a gain."""
    if node.target is not operators.attention.default:
        return False
    call = AttentionCall.of(node)
    if is_dilated(call.pattern):
        return True
    mask, (queries, keys) = call.mask_term, call.rows
    causal = call.pattern == "causal" and queries == keys
    plain = call.attn_mask is None and not any(mask.terms) and (call.pattern == "full" or causal)
    large = mask.is_as_large_as_scores(*shape_of(call.q)[:2])
    spelled = info.form == "unfused" and call.sinks is None and mask.score is None and not large
    backward = info.form == "flex" and value_of(call.q).device.type == "cpu" and requires_grad(node.graph)[node]
    return call.seed is not None or spelled or backward or (info.masked and plain)


def warn_of_limit(report: Report, options: Options) -> None:
    """Before Dynamo compiles no more of a frame, and says so in words that have nothing of ranks. On one process that
    is told of graphs that ringopt has made for one length. Raises RefusedError on several, where refusals are
    errors."""
    before, limit = compilation_of_frame(), dynamo.recompile_limit()
    if before is None or before + 1 != limit:
        return
    fixed = [note for note in report.notes if "another compiles another graph" in note or "these sizes only" in note]
    if report.world_size == 1 and not fixed:
        return
    why = f" This one: {'; '.join(fixed)}." if fixed else ""
    runs = "right and whole on every rank" if report.world_size > 1 else "by torch's own stream where it draws"
    message = (
        f"graph {limit} of one function, and torch._dynamo.config.recompile_limit allows no more: whatever none of "
        f"them serves (another length, train after eval) will run without the compiler, {runs}.{why} "
        "Raise the limit before the model is first called, pad inputs to fewer lengths (pad_to_multiple_of of a "
        "collator), or torch._dynamo.mark_dynamic their dim; TORCH_LOGS=recompiles says what each was compiled for"
    )
    if options.on_refusal == "error" and report.world_size > 1:
        raise RefusedError(f'{message}. It is an error because of on_refusal="error"')
    log.warning("%s", message)


def in_order(gm: fx.GraphModule, order: Order | None, inputs: Sequence[Any], compiler: Compile) -> Run:
    """`gm`, compiled with inputs and outputs in their canonical order: a partitioner and autograd follow them."""
    if order is None or order.is_that_of_caller:
        return compiler(gm, inputs)
    order.apply(gm.graph)
    gm.recompile()
    with faked_in_order(inputs):
        return Reordered(compiler(gm, order.of_inputs(inputs)), order)
