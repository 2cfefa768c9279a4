"""`ringopt.convert`: an ExportedProgram to one that runs on any number of ranks.

    q, k, v = linear(x)                     n = rows_here(4096, "zigzag", "any")
    y = sdpa(q, k, v)              ->       q, k, v = linear(scatter(x, n))
    return y                                return gather(ring_attention(q, k, v, 4096, ...))

The passes are those of the backend. What differs: rank and number of ranks are not known, so local sizes are open
(unbacked symbols that follow from `rows_here`), and the mesh is called "any": the default process group of whoever runs
the program, or that process alone. The program keeps its signature, state and call; what an operator of ringopt means
is noted in meta["custom"], which torch.export saves.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

import torch
import torch.fx as fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind

from ringopt.calls import OpCall
from ringopt.distributed.mesh import ANY, Mesh, PretendedMesh
from ringopt.drivers.announce import log_report, raise_or_warn
from ringopt.drivers.compile import line_of_passes
from ringopt.drivers.compiled import Compiled
from ringopt.errors import ProgramError
from ringopt.frontend.capture import Captured, capture
from ringopt.frontend.dynamic_shapes import sizes_of
from ringopt.ir.nodes import is_tensor, op_name
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.printer import short
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.site import SiteInfo
from ringopt.ir.symbolic_sizes import Linear, formula, into_assertions
from ringopt.ops import operators
from ringopt.options import Options
from ringopt.output.printable import logger
from ringopt.pipeline import Context
from ringopt.report import Report
from ringopt.reporting.dump import Dump
from ringopt.reporting.figures import report_of
from ringopt.torch_compat.schema import OpOverload
from ringopt.torch_compat.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from ringopt.version import __version__

log = logger(__name__)

KEPT = ("val", "stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "custom", "unbacked_bindings")
# What the report and the choice of strategies look at, where the number of ranks is open.
LOOKED_AT = 2
# The graph has to be the same for these places (rank, of how many), or it depends on what is known only later.
PLACES = ((0, LOOKED_AT), (1, 3))
# Operators that a site becomes, or stays.
SITES = ("ring_attention", "dilated_attention", "attention", "scaled_dot_product_attention")
HERE_ONLY = ("mesh", "inner_backend", "timeout", "on_refusal", "dump", "trace")


class AnyRank(PretendedMesh):
    """Rank 0 of some, for the passes: the program asks again when it runs."""

    @property
    def name(self) -> str:
        return ANY


def convert(
    program: ExportedProgram, options: Mapping[str, Any] | Options | None = None, *, allow_empty: bool = False
) -> ExportedProgram:
    """A program of the same signature and state that shards its sequence over the ranks of whoever runs it.

    On one process it computes what `program` does; under torchrun every rank passes the same full inputs and has the
    whole outputs and, if it calls backward, the complete gradients. `allow_empty`: a program of which nothing can be
    sharded is returned as it is. Warns of what the export may have lost (checkpointing, custom backward). Raises
    ProgramError (converted already, open sizes, nothing to shard), RefusedError (on_refusal="error"), OptionError.
    """
    return convert_program(program, options, allow_empty)[0]


def convert_program(
    program: ExportedProgram, options: Mapping[str, Any] | Options | None = None, allow_empty: bool = False
) -> tuple[ExportedProgram, Report]:
    """The program, and the report of it on LOOKED_AT ranks."""
    chosen = options_of(options)
    check_convertible(program)
    captured = captured_once(program)
    silent = dataclasses.replace(chosen, dump=None)
    made = [
        lowered(program, captured, chosen, AnyRank(*PLACES[0])),
        lowered(program, captured, silent, AnyRank(*PLACES[1]), logged=False),
    ]
    asked, report = guards_of(program), made[0].report
    lost = lost_in_export(program)
    for what in lost:
        log.warning(what)
    report = dataclasses.replace(report, notes=(*report.notes, *lost))
    if report.refusal is not None or made[0].graph is None:
        reasons = [f"{site.module or 'attention'}: {site.refusal}" for site in report.sites]
        why = "; ".join([*reasons, *report.left_alone, *filter(None, [report.refusal])]) or "no attention was found"
        if allow_empty:
            return program, report
        raise ProgramError(f"nothing of this program can be sharded: {why}. allow_empty=True keeps it as it is")
    log_report(log, report)
    raise_or_warn(report, chosen)
    check_fixed(program)
    gm = for_any_rank(made)
    into_assertions(gm.graph, asked)
    if made[0].draws_random:
        raise ProgramError(
            f"{', '.join(made[0].draws_random[:3])} draw random numbers that must be the same on every rank, "
            "which a converted program cannot check; export the model in eval mode"
        )
    keep_names(program, gm.graph)
    compare_inputs(program, gm, chosen)
    return rebuilt(program, gm, made[0].sites), report


def for_any_rank(made: Sequence[Compiled]) -> fx.GraphModule:
    """The lowered graph, made for two places of different meshes, if it is the same text."""
    texts = [short(one.graph.graph).splitlines() if one.graph is not None else [] for one in made]
    if texts[0] != texts[1]:
        one, other = next(pair for pair in zip_longest(*texts, fillvalue="nothing") if pair[0] != pair[1])
        raise ProgramError(
            "the sharded program depends on the number of ranks, so one file cannot serve all: "
            f"{one.strip()} on 2 ranks and {other.strip()} on 3; options strategy and layout may fix it"
        )
    assert made[0].graph is not None, "what cannot be sharded was refused before"
    return made[0].graph


def options_of(options: Mapping[str, Any] | Options | None) -> Options:
    """The options of a conversion. Raises ProgramError for those that only a compiled model can follow."""
    chosen = Options.of(options)
    if chosen.mesh is not None:
        raise ProgramError("option mesh belongs to one run; a converted program takes the ranks of whoever runs it")
    if chosen.inputs != "global":
        raise ProgramError(f"option inputs={chosen.inputs!r}: a converted program keeps its signature, whole inputs")
    if not chosen.sync_gradients:
        raise ProgramError("option sync_gradients=False: a converted program sums the gradients of its parameters")
    if chosen.outputs != "gather":
        raise ProgramError(f"option outputs={chosen.outputs!r}: a converted program keeps its signature, whole outputs")
    if chosen.verify:
        raise ProgramError("option verify is for compiled models; a file is verified by `ringopt convert --verify`")
    return chosen


def check_convertible(program: ExportedProgram) -> None:
    """Raises ProgramError for what is no ExportedProgram, is converted already, or has a dynamic size of no input."""
    if not isinstance(program, ExportedProgram):
        raise ProgramError(f"convert takes what torch.export.export returns; found {type(program).__name__}")
    for node in program.graph.nodes:
        ours = isinstance(node.target, OpOverload) and node.target.namespace == "ringopt"
        if ours and op_name(node) != "attention":  # which a module of ringopt.nn calls
            raise ProgramError(f"the program is converted already: {node.name} is {node.target}")
    inputs = program.graph.find_nodes(op="placeholder")
    read = [Linear.of(formula(size)) for node in inputs for size in sizes_of(node.meta.get("val"))]
    known = {size.count for size in read if size is not None}
    symbols = {symbol for size in program.range_constraints for symbol in size.free_symbols}
    missing = sorted(str(symbol) for symbol in symbols - known)
    if missing:
        raise ProgramError(
            f"{', '.join(missing)} cannot be read from the sizes of the inputs: it depends on data, or appears in "
            "products and rounded quotients only; export the program with plain Dims"
        )


def shape_env_of(program: ExportedProgram) -> ShapeEnv:
    """What holds the open sizes of the program."""
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    envs = [size.node.shape_env for value in values for size in sizes_of(value) if isinstance(size, torch.SymInt)]
    return envs[0] if envs else ShapeEnv()


def guards_of(program: ExportedProgram) -> list[Any]:
    """What was taken for granted of open sizes, in the export and by the passes. That two sizes are one is a guard of
    the exported program's own."""
    env = shape_env_of(program)
    return [asked for asked in dict.fromkeys(env.replace(guard.expr) for guard in env.guards) if asked != True]  # noqa: E712


def check_fixed(program: ExportedProgram) -> None:
    """Raises ProgramError where reading masks and views has specialized a dynamic size."""
    env = shape_env_of(program)
    fixed = {symbol: env.replacements[symbol] for symbol in program.range_constraints if symbol in env.replacements}
    if fixed:
        sizes = ", ".join(f"{symbol} is {number}" for symbol, number in fixed.items())
        raise ProgramError(
            f"an open size is fixed where a mask or a view is read ({sizes}); export the program without dynamic_shapes"
        )


LOST = (
    (re.compile(r"\bcheckpoint\("), "activation checkpointing: the program keeps what the model would compute again"),
    (re.compile(r"\.apply\("), "the backward of a custom autograd.Function: that of its forward is taken instead"),
)


def lost_in_export(program: ExportedProgram) -> list[str]:
    """What torch.export leaves out silently, as far as the source lines of the nodes show."""
    found: dict[str, str] = {}
    for node in program.graph.nodes:
        for line in (node.meta.get("stack_trace") or "").splitlines():
            for sign, what in LOST:
                if sign.search(line):
                    found.setdefault(what, f"export may have lost {what} ({line.strip()})")
    return list(found.values())


def captured_once(program: ExportedProgram) -> Callable[[], Captured]:
    """A call gives the flat graph of the program, to edit. Raises GraphRefused."""

    @cache
    def captured() -> Captured:
        return capture(copy.deepcopy(program.graph_module), inputs_of(program), shape_env_of(program))

    def copied() -> Captured:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Raw Sym")  # as in the pipeline
            return dataclasses.replace(captured(), graph=copy.deepcopy(captured().graph))

    return copied


def lowered(
    program: ExportedProgram, captured: Callable[[], Captured], options: Options, mesh: Mesh, logged: bool = True
) -> Compiled:
    """What the passes make of the program for one place of a mesh."""
    context, dump = Context(options, mesh), Dump(options, mesh.rank)

    def begin() -> Captured:
        found = captured()
        if any(claim.places for claim in found.claims):
            raise GraphRefused(
                Refusal("a converted program cannot check the block tables of flex_attention at each run")
            )
        gm = found.begin(context)
        context.values = {node: value for node, value in context.values.items() if node.op == "get_attr"}
        context.values |= lifted_constants(program, gm)
        return found

    try:
        made = line_of_passes(begin, context, dump, lambda step, gm: dump.passed(step, gm, context), logged)
    except GuardOnDataDependentSymNode as problem:
        reason = str(problem).splitlines()[0]
        raise ProgramError(f"something depends on how many rows a rank has: {reason}") from problem
    if isinstance(made, Report):
        return Compiled(None, made)
    report = report_of(made.graph.graph, context)
    dump.done(report, made.graph)
    return Compiled.of(made, report, context) if context.shards else Compiled(None, report)


def inputs_of(program: ExportedProgram) -> list[Any]:
    """What each placeholder is given while the program is captured. An input may need a gradient when the program runs,
    so every floating one is taken to need it."""
    given = []
    placeholders = program.graph.find_nodes(op="placeholder")
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        value = program.state_dict.get(spec.target, program.constants.get(spec.target, node.meta.get("val")))
        if spec.kind is InputKind.USER_INPUT and isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.detach().requires_grad_()
        given.append(value)
    return given


def lifted_constants(program: ExportedProgram, gm: fx.GraphModule) -> dict[fx.Node, torch.Tensor]:
    """Tensors that the program was written with. Not its buffers: those may hold something else in the next state."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    pairs = zip(program.graph_signature.input_specs, placeholders, strict=True)
    constants = [(node, spec.target) for spec, node in pairs if spec.kind is InputKind.CONSTANT_TENSOR]
    return {node: program.constants[target] for node, target in constants}


def keep_names(program: ExportedProgram, graph: fx.Graph) -> None:
    """Inputs are called as they were, also those that FX renames (`input` is a name of Python's)."""
    taken = {node.name for node in graph.nodes}
    for spec, node in zip(program.graph_signature.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        if spec.arg.name not in taken:
            node.name = spec.arg.name


def compare_inputs(program: ExportedProgram, gm: fx.GraphModule, options: Options) -> None:
    """Before the first rows are cut, the ranks compare what they were given."""
    pairs = zip(program.graph_signature.input_specs, gm.graph.find_nodes(op="placeholder"), strict=True)
    given = [node for spec, node in pairs if spec.kind is InputKind.USER_INPUT and is_tensor(node)]
    names, text = [node.name for node in given], hashlib.blake2b(short(gm.graph).encode(), digest_size=8).hexdigest()
    first = gm.graph.find_nodes(op="call_function", target=operators.rows_here.default)[0]
    OpCall.of(first).replace(inputs=given, names=",".join(names), program=text, when=options.check_inputs).write(first)


# ---- from the graph to a program -------------------------------------------------------------------------------------
def rebuilt(program: ExportedProgram, gm: fx.GraphModule, sites: Mapping[str, SiteInfo]) -> ExportedProgram:
    """`gm` under the signature, state and call of `program`."""
    for node in gm.graph.nodes:
        note(node, sites)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            raise ProgramError(f"a constant of the program ({node.target}) has no place in its signature")
        node.meta = {key: value for key, value in node.meta.items() if key in KEPT}
        if node.op == "placeholder" and is_tensor(node) and node.meta["val"].is_leaf:
            node.meta["val"].requires_grad_(False)
    ranges = dict(program.range_constraints)
    for node in gm.graph.nodes:
        for symbol in node.meta.get("unbacked_bindings", ()):
            ranges[symbol] = node.meta["val"].node.shape_env.var_to_range[symbol]
    return ExportedProgram(
        gm,
        gm.graph,
        renamed(program.graph_signature, gm.graph),
        program.state_dict,
        ranges,
        [dataclasses.replace(entry, signature=copy.copy(entry.signature)) for entry in program.module_call_graph],
        program.example_inputs,
        program.constants,
        verifiers=program.verifiers,
    )


def note(node: fx.Node, sites: Mapping[str, SiteInfo]) -> None:
    """Writes into a node what a file keeps of it beyond its operator: placement, and the site that it was made from."""
    if node.op != "call_function":
        return
    # Of several results a file keeps the meta of the node that makes them.
    tells = next(iter(node.users), node) if isinstance(node.meta.get("val"), (list, tuple)) else node
    alone = "local" if tells.meta.get(WHOLE) is None else "replicated"
    custom: dict[str, Any] = {"placement": str(tells.meta.get(PLACEMENT) or alone)}
    site = sites.get(node.name.removesuffix(f"_{op_name(node)}"))
    if site is not None and op_name(node) in SITES:
        custom["site"] = {"pattern": site.pattern, "refusal": site.refusal}
    if getattr(node.target, "namespace", "") == "ringopt":
        # torch.export.load does not know the operator before ringopt.ops is imported, and its error prints this.
        custom["read_by"] = "ringopt.load(path)"
    node.meta["custom"] = {**(node.meta.get("custom") or {}), "ringopt": custom}


def renamed(signature: ExportGraphSignature, graph: fx.Graph) -> ExportGraphSignature:
    """The signature with the names of `graph`, whose inputs and outputs stand in the same order."""
    found = copy.deepcopy(signature)
    for spec, node in zip(found.input_specs, graph.find_nodes(op="placeholder"), strict=True):
        spec.arg = dataclasses.replace(spec.arg, name=node.name)
    for out, value in zip(found.output_specs, graph.output_node().args[0], strict=True):
        if isinstance(value, fx.Node):
            out.arg = dataclasses.replace(out.arg, name=value.name)
    return found


def provenance(options: Mapping[str, Any] | Options | None, report: Report) -> dict[str, Any]:
    """What a file records of its making."""
    chosen = Options.of(options)
    kept = {name: getattr(chosen, name) for name in Options.names()}
    return {
        "ringopt": __version__,
        "torch": torch.__version__,
        "options": {name: value for name, value in kept.items() if name not in HERE_ONLY},
        "report": report.to_dict(),
    }
