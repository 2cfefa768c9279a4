"""Translation validation: a program and its sharded form agree on every rank, in value and in every gradient.

The sharded graphs of p ranks run as threads of one process (tests/harness/threads.py), through the operators and
backward formulas of the product. After Pnueli, Siegel and Singerman, Translation Validation (1998): not the compiler is
proved but each of its outputs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.fx as fx
import torch.nn as nn
from torch.func import functional_call
from torch.fx._lazy_graph_module import _LazyGraphModule

from ringopt.distributed.mesh import PretendedMesh
from ringopt.drivers.compile import transform
from ringopt.frontend.capture import Captured, capture
from ringopt.frontend.higher_order.associative_scan import keeps_associative_scans
from ringopt.ir.autograd_function import custom_gradients
from ringopt.ir.refusal import GraphRefused
from ringopt.options import Options
from ringopt.passes import LINE, UNDERSTAND, with_options
from ringopt.pipeline import Context, Pipeline
from ringopt.report import Report
from ringopt.reporting.figures import report_of
from tests.harness.threads import run_on_threads

TOLERANCE = 1e-8  # float64, relative to the largest entry


class Seat(PretendedMesh):
    """The place of one rank while its graph is made; when the graph runs, its thread is that rank."""

    @property
    def name(self) -> str:
        return "threads"


@dataclass(frozen=True)
class Verdict:
    """`wrong` is the first thing that differs, "" where all agree; `found` is what each rank has."""

    wrong: str
    report: Report
    graph: fx.GraphModule
    found: list[Values]


def captured(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's graph and its inputs; the program must be one graph."""
    return captured_graphs(module, args, kwargs, fullgraph=True)[0]


def captured_graphs(
    module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], fullgraph: bool
) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Every graph that Dynamo makes of `module(*args, **kwargs)`, with its inputs."""
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    @keeps_associative_scans
    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, [int(x) if isinstance(x, torch.SymInt) else x for x in inputs]))
        origins.update((node, node.meta["grapharg"]) for node in gm.graph.nodes if "grapharg" in node.meta)
        return gm.forward

    origins: dict[fx.Node, Any] = {}
    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=fullgraph)(*args, **kwargs)
    for node, origin in origins.items():  # Dynamo takes them away after its backend has run
        node.meta["grapharg"] = origin
    return found


def validate(p: int, module: nn.Module, *args: Any, tolerance: float = TOLERANCE, **options: Any) -> Verdict:
    """Shards `module(*args)` over p ranks and compares each with the original; `args` may end in a dict of keywords."""
    keywords = args[-1] if args and isinstance(args[-1], dict) else {}
    gm, inputs = captured(module, *args[: len(args) - bool(keywords)], **keywords)
    return validate_graph(p, gm, inputs, tolerance, **options)


def validate_graph(p: int, gm: fx.GraphModule, inputs: list[Any], tolerance: float, **options: Any) -> Verdict:
    """What `validate` does, with Dynamo's graph."""
    expected = values_and_gradients(gm, inputs)
    with patch("ringopt.drivers.compile.capture", captured_once()):
        made = [transform(gm, inputs, Options(**options), Seat(rank, p)) for rank in range(p)]
    graphs = [one.graph if one.graph is not None else gm for one in made]
    results = run_on_threads(p, lambda mesh: values_and_gradients(graphs[mesh.rank], inputs))
    wrong = [
        f"rank {rank}: {said}" for rank, found in enumerate(results) if (said := difference(expected, found, tolerance))
    ]
    return Verdict(wrong[0] if wrong else "", made[0].report, graphs[0], results)


def captured_once() -> Callable[..., Captured]:
    """`capture` for all ranks of one graph: it is not told of ranks, and takes a third of the time of the passes."""
    kept: list[Captured] = []

    def captured(gm: fx.GraphModule, inputs: Sequence[Any], shape_env: Any = None) -> Captured:
        made = kept[0] if kept else capture(gm, inputs, shape_env)
        # What else passes write to is not copied with a graph: regions, backwards of their own, the guards of sizes.
        if shape_env is None and not made.regions.made and not custom_gradients(made.graph.graph):
            kept[:] = [made]
            made = replace(made, graph=_LazyGraphModule(made.graph, copy.deepcopy(made.graph.graph)))
        return made

    return captured


def validate_function(p: int, function: Callable[..., Any], inputs: list[Any], **options: Any) -> Verdict:
    """What `validate` does, with a plain function of tensors that returns a tuple of them. For tests of many programs:
    without Dynamo, and the passes that no rank has a part in run once."""
    expected = values_and_gradients(function, inputs)
    chosen = Options(**options)
    shared = Context(chosen, Seat(0, p))
    try:
        program = call_of(function, len(inputs), len(function(*inputs)))
        flat = capture(program, inputs).begin(shared)
        Pipeline(with_options(UNDERSTAND, chosen)).run(flat, shared)
        made = [of_rank(flat, shared, Seat(rank, p)) for rank in range(p)]
    except GraphRefused as refused:
        report = report_of(fx.Graph(), Context(chosen, Seat(0, p)), refused.refusal.sentence)
        return Verdict("", report, fx.GraphModule({}, fx.Graph()), [])
    for gm, _ in made:  # ranks may share one graph, whose code threads cannot write at the same time
        _LazyGraphModule.force_recompile(gm)
    results = run_on_threads(p, lambda mesh: values_and_gradients(made[mesh.rank][0], inputs))
    wrong = [f"rank {rank}: {said}" for rank, found in enumerate(results) if (said := difference(expected, found))]
    if wrong and is_unstable(capture(program, inputs).graph, inputs, expected):  # `flat` is what the passes made of it
        wrong = []
    return Verdict(wrong[0] if wrong else "", report_of(made[0][0].graph, made[0][1]), made[0][0], results)


def validate_module(p: int, module: nn.Module, *args: Any, **options: Any) -> Verdict:
    """What `validate` does, without Dynamo, which takes as long as all the passes: for tests of what is made of a
    graph, whoever captured it."""
    held = dict([*module.named_parameters(), *module.named_buffers()])

    def program(*values: Any) -> tuple[Any, ...]:
        found = functional_call(module, dict(zip(held, values[len(args) :], strict=True)), values[: len(args)])
        outputs = found if isinstance(found, tuple) else (found,)
        assert all(isinstance(out, torch.Tensor) for out in outputs), "nothing else is compared"
        return outputs

    return validate_function(p, program, [*args, *held.values()], **options)


def call_of(function: Callable[..., Any], inputs: int, outputs: int) -> fx.GraphModule:
    """A graph that calls `function`."""

    def program(*args: Any) -> Any:  # has a name, as the graph wants it
        return function(*args)

    graph = fx.Graph()
    made = graph.call_function(program, tuple(graph.placeholder(f"input_{i}") for i in range(inputs)))
    graph.output(tuple(graph.call_function(operator.getitem, (made, i)) for i in range(outputs)))
    return _LazyGraphModule({}, graph)


def of_rank(flat: fx.GraphModule, shared: Context, mesh: Seat) -> tuple[fx.GraphModule, Context]:
    """The rest of the passes, for one rank, over a graph that stays as it is."""
    sites = {node: replace(info, notes=list(info.notes)) for node, info in shared.sites.items()}
    own = replace(shared, mesh=mesh, sites=sites, gathers=[], replicated_random=[])
    gm = _LazyGraphModule(flat, flat.graph)  # writes its code only once
    Pipeline(with_options(LINE[len(UNDERSTAND) :], own.options)).run(gm, own)
    return gm, own


class Shaken(fx.Interpreter):
    """Runs a graph with rounding errors a thousand times as large as float64 has them."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().call_function(target, args, kwargs)
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
            return value * (1 + 1e-13 * torch.randn_like(value))
        return value


def is_unstable(flat: fx.GraphModule, inputs: list[Any], expected: Values) -> bool:
    """Whether rounding alone changes what the program says: an order of equal values, a sign of zero."""
    with torch.random.fork_rng():
        return any(difference(expected, values_and_gradients(Shaken(flat).run, inputs)) for _ in range(8))


def with_seed(gm: fx.GraphModule) -> fx.GraphModule:
    """Threads share one generator, which ranks do not: seeds are numbers instead."""
    for node in gm.graph.nodes:
        if node.target is torch.ops.ringopt.seeds.default:
            given = {"dtype": torch.int64}
            node.target, node.args, node.kwargs = torch.ops.aten.arange.start, (5, 5 + node.args[0]), given
    gm.recompile()
    return gm


Values = tuple[list[Any], list[Any]]


def values_and_gradients(run: Any, inputs: Sequence[Any]) -> Values:
    """Outputs and the gradients of all inputs. Every output takes part in the backward, with unequal weights."""
    copies = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    outputs = [out for out in run(*copies) if isinstance(out, torch.Tensor)]
    differentiable = [out for out in outputs if out.requires_grad]
    weights = [
        torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out) for out in differentiable
    ]
    if differentiable:
        torch.autograd.backward(differentiable, weights)
    changed = [x.detach() for x in copies if isinstance(x, torch.Tensor)]
    return [out.detach() for out in outputs] + changed, [getattr(x, "grad", None) for x in copies]


def difference(expected: Values, found: Values, tolerance: float = TOLERANCE) -> str:
    for what, ours, theirs in zip(("output", "gradient"), expected, found, strict=True):
        for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a is None and b is None:
                continue
            if a is None or b is None:
                return f"{what} {k}: expected {'none' if a is None else 'one'}, found {'none' if b is None else 'one'}"
            # A row picked from a large value is returned without the rest of that value.
            strided = what == "output" and is_dense(a)
            if a.shape != b.shape or a.dtype != b.dtype or (strided and steps(a) != steps(b)):
                return (
                    f"{what} {k}: {list(a.shape)} {a.dtype} {a.stride()} became {list(b.shape)} {b.dtype} {b.stride()}"
                )
            error = relative_error(a, b, ours)
            if not error <= tolerance:
                return f"{what} {k} {list(a.shape)}: relative error {error:.1e}"
    return ""


def steps(x: torch.Tensor) -> list[int]:
    """Its strides, where they matter: not those of dims of size 1."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def is_dense(x: torch.Tensor) -> bool:
    """Whether its memory has no holes."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or x.numel() == extent


def relative_error(expected: torch.Tensor, found: torch.Tensor, group: Sequence[Any]) -> float:
    """The largest error by the largest entry. Gradients that are zero in exact arithmetic (a key's bias) are rounding
    noise, not to be divided by: the largest entry of the whole `group` counts for 1e-4 at least. NaN equals NaN."""
    apart = (expected != found) & ~(expected.isnan() & found.isnan())
    if not apart.any():
        return 0.0
    error = float((expected[apart].double() - found[apart].double()).abs().max())
    return error / max(largest(expected), 1e-4 * max(largest(x) for x in group if x is not None) + 1e-12)


def largest(x: torch.Tensor) -> float:
    """Of the finite entries."""
    return float(torch.where(x.isfinite(), x, 0).double().abs().max()) if x.numel() else 0.0


def own_error(exact: Values, rounded: Values) -> float:
    """The largest relative error of a program in a lower precision, in any output or gradient."""
    pairs = [
        (a, b, ours) for ours, theirs in zip(exact, rounded, strict=True) for a, b in zip(ours, theirs, strict=True)
    ]
    return max(
        (relative_error(a, b, ours) for a, b, ours in pairs if a is not None and a.is_floating_point()), default=0.0
    )
