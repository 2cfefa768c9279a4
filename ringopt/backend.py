"""`torch.compile(model, backend="ring")`: found through the entry point group `torch_dynamo_backends`.

The object under the entry point is a plain function, and nothing here registers it: torch refuses a name that comes
twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._guards import CompileContext

from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.distributed.consistency import digest
from ringopt.distributed.lookup import mesh_of, process_mesh
from ringopt.distributed.mesh import Mesh
from ringopt.errors import RefusedError
from ringopt.expr.mask import Mask
from ringopt.frontend.capture import capture, known, unseen
from ringopt.frontend.dynamic_shapes import OpenSizes, shape_env_of, specialize
from ringopt.frontend.dynamo_polyfills import teach
from ringopt.frontend.flatten import has_custom
from ringopt.frontend.open_floats import floats_as_tensors, left_open
from ringopt.ir.checkpoint_regions import police, tags_of
from ringopt.ir.io_order import Reordered
from ringopt.ir.nodes import readable, requires_grad, shape_of, value_of
from ringopt.ir.refusal import GraphRefused
from ringopt.ops.ring import VERSION
from ringopt.options import Options
from ringopt.output.printable import logger
from ringopt.passes import ALONE, LINE, UNDERSTAND
from ringopt.pipeline import Context, Pass, Pipeline, SiteInfo
from ringopt.report import Report
from ringopt.reporting.dump import Dump
from ringopt.reporting.figures import report_of
from ringopt.runtime.failing import Failure, agreed, failure_of, is_passed_on
from ringopt.runtime.graph_boundary import Boundary, arriving, break_after, check_arrivals, ends_program, examples
from ringopt.runtime.input_check import CheckedInputs, call_of
from ringopt.runtime.mask_guards import Made, Watched
from ringopt.runtime.trace import trace_to, traced
from ringopt.runtime.verify import Original, Verified
from ringopt.tensor.lazy import Lazy

log = logger(__name__)

Compiled = Callable[..., Any]

_reports: list[Report] = []

# Steps in which no rank knows which it is: what fails there fails on all.
ALIKE = frozenset(("capture", *(step.name for step in UNDERSTAND)))

teach()  # before Dynamo traces: it looks the backend up first


def reports() -> list[Report]:
    """The reports of the graphs compiled so far in this process, oldest first."""
    return list(_reports)


def ring(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Compiled:
    """The backend. `options` are those of `ringopt.Options`, `mode` is Inductor's.

    Raises OptionError, RefusedError (with on_refusal="error"), and at the first call RingMismatchError.
    """
    chosen = Options.of(options)
    mesh = mesh_for(chosen)
    names = [readable(node.name) for node in gm.graph.find_nodes(op="placeholder")]

    called = [node.target for node in gm.graph.nodes if node.op.startswith("call")]
    operators = dict(Counter(getattr(target, "__name__", str(target)) for target in called))
    mesh.recent.folder = chosen.dump or mesh.recent.folder
    # Ranks may have their inputs in another order yet, so what is told of them has none.
    called_with = digest(repr(sorted(operators.items())).encode())
    given = sorted(example_inputs, key=lambda x: f"{getattr(x, 'shape', x)} {getattr(x, 'dtype', '')}")
    mesh.stands(call_of("compiles a graph", called_with, given, operators), publish=True)

    original = Original(gm, names) if chosen.verify else None

    def make(inputs: Sequence[Any], anew: bool) -> Made:
        with unseen():
            flat, report, random = transform(gm, inputs, chosen, mesh, anew)
        _reports.append(report)
        log.info("%s", report)
        tell(report, chosen)
        if mesh.size > 1 and not anew:
            tell_of_limit(report)
        meta = flat.meta if flat is not None else {}
        given, left = meta.get("given", {}), meta.get("left", {})
        with left_open(gm):
            run = in_order(flat if flat is not None else gm, examples(inputs, given), chosen, mode)
        if left or any(isinstance(x, Lazy) for x in inputs):
            run = Boundary(run, given, left)
        if flat is not None and mesh.size > 1:
            check = (chosen.check_inputs, random, operators)
            run = CheckedInputs(run, mesh, meta["program"], meta["order"].inputs, names, *check)
        if flat is not None and chosen.trace is not None:
            run = traced(run, trace_to(chosen.trace, mesh.rank))
        if original is not None:
            run = Verified(run, original, mesh, meta.get("local", {}), meta.get("averaged", ()))
        return run, meta.get("relied_on", ()), meta.get("claims", ())

    watched = Watched(make, example_inputs)
    return watched if watched.seen else watched.run


def mesh_for(options: Options) -> Mesh:
    if options.mesh is None and not (dist.is_available() and dist.is_initialized()):
        launched = os.environ.get("WORLD_SIZE", "1")
        if launched not in ("", "1"):
            log.warning(
                "compiled for this process alone, which was launched as one of %s (WORLD_SIZE): torch.distributed is "
                "not initialized. Call torch.distributed.init_process_group before the model is first called",
                launched,
            )
        return mesh_of("pretend:0/1")
    return process_mesh(options.mesh, options.timeout)


def transform(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh, anew: bool = False
) -> tuple[fx.GraphModule | None, Report, bool]:
    """The graph to compile in place of `gm`, or None where `gm` itself is best; what was done; and whether the graph
    draws random numbers that must be the same on every rank. Its meta "relied_on" has the places of the inputs whose
    numbers were read, "given" the inputs of which it takes this rank's rows, "left" the outputs that are to be lazy,
    "local" those that are this rank's rows, "averaged" the inputs of whose gradients the mean is left to a wrapper,
    "weights" what is made of pairs of rows and is no site, by name.
    Made `anew`, when Dynamo takes no more guards, it is a graph for the sizes of `example_inputs` only. Where a pass
    fails, `gm` itself is best, on all ranks alike (ringopt/runtime/failing.py)."""
    if "local" in (options.inputs, options.outputs) and not ends_program(gm):
        options = replace(options, outputs="lazy")  # what crosses a graph break is what the program says it is
    made = attempted(gm, example_inputs, options, mesh, anew)
    if isinstance(made, Failure) and not anew and shape_env_of(gm) is not None:
        specialize(gm)  # other sizes compile other graphs
        said, made = made.sentence, attempted(gm, example_inputs, options, mesh)
        if not isinstance(made, Failure):
            flat, report, random = made
            return flat, replace(report, notes=(*report.notes, f"compiled for these sizes only: {said}")), random
    if isinstance(made, Failure):
        report = report_of(fx.Graph(), Context(options, mesh), made.refusal)
        Dump(options, mesh.rank).done(report, None)
        return None, report, False
    return made


Transformed = tuple[fx.GraphModule | None, Report, bool]


def attempted(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mesh: Mesh, anew: bool = False
) -> Transformed | Failure:
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


def passed_through(gm: fx.GraphModule, example_inputs: Sequence[Any], context: Context, anew: bool) -> Transformed:
    """`transform`, as far as nothing fails."""
    options, mesh, sizes = context.options, context.mesh, OpenSizes(gm)
    given = arriving(example_inputs, mesh)
    if not anew:
        floats_as_tensors(gm)
        # Rows arrive as they were cut: of one length. A custom backward is a graph for one length, and one process
        # keeps no sizes open.
        if given or has_custom(gm) or (options.dilates and mesh.size == 1):
            specialize(gm)
    shape_env = shape_env_of(gm) if not anew else None
    if mesh.size == 1 and shape_env is not None:
        return None, Report(1, notes=("sizes are open, and one process gains nothing from fixing them",)), False
    dump = Dump(options, mesh.rank)

    def passed(step: Pass, gm: fx.GraphModule) -> None:
        sizes.passed(step.name)
        dump.passed(step, gm)

    try:
        flat = capture(gm, example_inputs, shape_env)
        context.values = known(flat)
        sizes.passed("capture")
        dump.captured(flat)
        inputs = flat.graph.find_nodes(op="placeholder")
        context.given = {inputs[i]: where for i, where in given.items()}
        Pipeline(LINE if mesh.size > 1 else ALONE, passed).run(flat, context)
    except GraphRefused as refused:
        report = report_of(fx.Graph(), Context(options, mesh), refused.refusal.sentence)
        dump.done(report, None)
        return None, report, False
    context.step = "report"
    check_arrivals(context, inputs)
    flat.meta["relied_on"] = [place for place, node in enumerate(inputs) if node in context.relied_on]
    flat.meta["given"] = {i: context.given[node] for i, node in enumerate(inputs) if node in context.given}
    flat.meta["left"] = context.left if options.outputs == "lazy" else {}
    flat.meta["local"] = context.left if options.outputs == "local" else {}
    flat.meta["weights"] = context.weights
    parameters = [place for place, node in enumerate(inputs) if node.meta.get("parameter")]
    flat.meta["averaged"] = [] if options.sync_gradients else parameters
    context.notes += sizes.notes if shape_env is not None else ()
    if mesh.size > 1:
        context.notes += break_after(gm, context.gathers, len(flat.meta["left"]))
        context.notes += [mesh.remark] if mesh.remark else []
    report = report_of(flat.graph, context)
    dump.done(report, flat)
    sites = [(node, info) for node, info in context.sites.items() if info.refusal is None]
    if mesh.size == 1:
        sites = [(node, info) for node, info in sites if gains_alone(node, info)]
    return (flat if sites or context.given or context.pairs else None), report, bool(context.replicated_random)


def gains_alone(node: fx.Node, info: SiteInfo) -> bool:
    """On one process: whether SDPA takes the place of products written out, or of SDPA with a mask that is needless; or
    whether weights are dropped, which are to be the same as on many ranks; or flex_attention whose backward the CPU
    lacks; or whether it is dilated, which is for the options to say and not a gain."""
    if node.target is not torch.ops.ringopt.attention.default:
        return False
    q, k, _v, given, _sources, sinks, seed, pattern, text = node.args[:9]
    if is_dilated(pattern):
        return True
    mask, square = Mask.parse(text), shape_of(q)[2] == shape_of(k)[2]
    plain = given is None and not any(mask.terms) and (pattern == "full" or (pattern == "causal" and square))
    large = mask.is_as_large_as_scores(*shape_of(q)[:2])
    spelled = info.form == "unfused" and sinks is None and mask.score is None and not large
    backward = info.form == "flex" and value_of(q).device.type == "cpu" and requires_grad(node.graph)[node]
    return seed is not None or spelled or backward or (info.masked and plain)


def tell(report: Report, options: Options) -> None:
    """Refusals, as the user asked to hear of them. Without ranks to shard over there is nothing to refuse but to
    dilate."""
    reasons = [f"{site.module or 'attention'}: {site.refusal}" for site in report.sites if site.refusal]
    reasons += [report.refusal] if report.refusal else []
    reasons += report.left_alone if not report.sites else ()
    undilated = [f"{site.module or 'attention'}: {site.not_dilated}" for site in report.sites if site.not_dilated]
    if options.dilates and not report.sites:
        undilated.append(report.refusal or "no attention was found")
    told = {"not sharded": reasons if report.world_size > 1 else [], "not dilated": undilated}
    message = ". ".join(f"{what}: {'; '.join(why)}" for what, why in told.items() if why)
    if not message or options.on_refusal == "ignore":
        return
    if options.on_refusal == "error":
        runs = "replicated on every rank" if told["not sharded"] else "as the model has it"
        raise RefusedError(message + f'. With on_refusal="warn" it runs {runs}')
    log.warning(message)


def tell_of_limit(report: Report) -> None:
    """Before Dynamo compiles no more of a frame, and says so in words that have nothing of ranks."""
    compiling, limit = CompileContext.current_compile_id(), torch._dynamo.config.recompile_limit
    if compiling is None or compiling.frame_compile_id is None or compiling.frame_compile_id + 1 != limit:
        return
    fixed = [note for note in report.notes if "another compiles another graph" in note or "these sizes only" in note]
    why = f" This one: {'; '.join(fixed)}." if fixed else ""
    log.warning(
        "graph %d of one function, and torch._dynamo.config.recompile_limit allows no more: whatever none of them "
        "serves (another length, train after eval) will run without the compiler, right and whole on every rank.%s "
        "Raise the limit before the model is first called, or pad inputs to fewer lengths; TORCH_LOGS=recompiles says "
        "what each was compiled for",
        *(limit, why),
    )


def in_order(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None) -> Compiled:
    """`inner`, with inputs and outputs in their canonical order: a partitioner and autograd follow them."""
    order = gm.meta.get("order")
    if order is None or order.is_that_of_caller:
        return inner(gm, example_inputs, options, mode)
    order.apply(gm.graph)
    gm.recompile()
    return Reordered(inner(gm, order.of_inputs(example_inputs), options, mode), order)


def inner(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None) -> Compiled:
    run: Compiled = gm
    if options.inner_backend != "eager":
        police(gm)
    if options.inner_backend == "aot_eager":
        from ringopt.overlap.start_early import aot_eager

        run = aot_eager(gm, example_inputs)
    elif options.inner_backend == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        from ringopt.overlap.start_early import inductor_settings

        patches = {**(list_mode_options(mode) if mode else {}), **inductor_settings(gm)}
        # Compiled code is cached by the text of a graph, in which our operators are names: what they do is not in it,
        # nor what is computed again in the backward.
        tag = f"{torch.compiler.config.cache_key_tag} ringopt {VERSION} {tags_of(gm)}"
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            run = compile_fx(gm, list(example_inputs), config_patches=patches)  # type: ignore[assignment]
    return run
