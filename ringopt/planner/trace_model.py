"""What a model says of itself at the size of its inputs, for `ringopt.plan`: its attentions, what it computes and sends
beside them, and what is live when. Traced once for each of a few numbers of ranks; nothing is executed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import DilatedCall, RingCall
from ringopt.cost.choose import Case
from ringopt.cost.dilated import DilatedCase
from ringopt.cost.simulate import Heads
from ringopt.distributed.mesh import PretendedMesh
from ringopt.drivers.compiled import Compiled
from ringopt.drivers.dry_run import DryRun, errors_of_passes
from ringopt.ir.nodes import is_parameter, is_tensor, module_path, named, op_name, requires_grad, shape_of, value_of
from ringopt.ir.notes import OF_PROGRAM, PLACEMENT, WHOLE
from ringopt.ops.expansion import expansion_of
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traffic import Sending
from ringopt.ops.traits import attends, sending_of, sends
from ringopt.options import Options
from ringopt.planner.liveness import Live, Shape, by_storage, live_of, of_parameters, partitioned
from ringopt.recognize.row_pairs import NO_SITE
from ringopt.reporting.figures import Figures, matrix_flops
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.pytree import tree_map_only
from ringopt.torch_compat.tensors import is_marked_dynamic

TRACED = (2, 4)  # ranks


@dataclass(frozen=True)
class PlannedSite:
    """One attention, or several alike: a case at the traced length, how often it occurs, and where: `module` is the
    first of `modules`."""

    module: str
    case: Case | DilatedCase
    times: int
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """What the traces say.

    length        of the longest sequence
    positions     how many learned positions a table has, by module
    dtype         of the attentions
    pairs         notes of the reports on weights of pairs that are no site
    shared_flops  forward, of products outside the attentions: of the whole sequence, where each rank does its rows
    pair_flops    the same, of those that make weights of pairs, or sum values by them
    own_flops     the same, where every rank does all
    moved         what each rank sends beside the attentions; by traced ranks, then by rank
    live          memory, of each graph; by traced ranks
    """

    length: int
    dtype: str
    sites: tuple[PlannedSite, ...]
    refused: tuple[str, ...]
    pairs: tuple[str, ...]
    training: bool
    shared_flops: int
    pair_flops: int
    own_flops: int
    moved: Mapping[int, Sequence[Sequence[Sending]]]
    live: Mapping[int, Sequence[Live]]
    positions: Mapping[str, int] = field(default_factory=dict)


def traced(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, hardware: str) -> Traced:
    """What a model is made of, by which a plan scales it: its attention sites, FLOPs, messages and live memory. It is
    sharded over two meshes without processes, on fake tensors; `length` is the longest sequence (tokens) met there."""
    live: dict[int, Sequence[Live]] = {}
    moved: dict[int, Sequence[Sequence[Sending]]] = {}
    refused, pairs = list[str](), list[str]()
    nodes: list[fx.Node] = []
    weights: dict[fx.Node, tuple[int, int]] = {}
    length = 0
    for ranks in TRACED:
        made = sharded(model, args, kwargs, options, PretendedMesh(0, ranks, hardware))
        refused, pairs = refusals(made), [note for one in made for note in one.report.notes if note.endswith(NO_SITE)]
        graphs = [one.graph for one in made if one.graph is not None]
        nodes = [node for graph in graphs for node in graph.graph.nodes]
        weights = {node: dims for one in made for node, dims in weights_of(one).items()}
        lengths = [n for site in sites_of(nodes) for n in (site.case.q_length, site.case.kv_length)]
        lengths += [node.meta[WHOLE].shape[dim] for node, dims in weights.items() for dim in dims]
        length = max(lengths or map(cut_length, nodes), default=0)
        if not length:
            return Traced(0, "", (), tuple(refused), tuple(pairs), False, 0, 0, 0, {}, {})
        parts = [partitioned(graph) for graph in graphs]
        rows, shapes = -(-length // ranks), {shape for at in weights.items() for shape in shapes_of_pairs(*at)}
        live[ranks] = [live_of(graph, part, rows, ranks, shapes) for graph, part in zip(graphs, parts, strict=True)]
        moved[ranks] = [
            [one for part in parts for one in sent_by_others(part, ranks, rank, rows)] for rank in range(ranks)
        ]
    ranks = TRACED[-1]
    shared = of_pairs = own = 0
    for node in nodes:
        if op_name(node) in ("ring_attention", "dilated_attention", "attention"):
            continue
        flops = matrix_flops(node, Figures(node.graph, PretendedMesh(0, ranks)))
        if not weights.keys().isdisjoint((node, *node.all_input_nodes)):
            of_pairs += flops * ranks
        elif any(x.meta.get(PLACEMENT) is not None for x in (node, *node.all_input_nodes)):
            shared += flops * ranks
        else:
            own += flops
    sites = tuple(sites_of(nodes))
    spread = list(weights) if weights or sites else list(filter(is_activation, nodes))
    training = torch.is_grad_enabled() and any(requires_grad(node.graph)[node] for node in spread)
    training = training or any(site.case.training for site in sites)
    dtype = sites[0].case.heads.dtype if sites else str(value_of(spread[0]).dtype).removeprefix("torch.")
    return Traced(
        length=length,
        dtype=dtype,
        sites=sites,
        refused=tuple(refused),
        pairs=tuple(pairs),
        training=training,
        shared_flops=shared,
        pair_flops=of_pairs,
        own_flops=own,
        moved=moved,
        live=live,
        positions=positions_of(nodes),
    )


def positions_of(nodes: Sequence[fx.Node]) -> dict[str, int]:
    """Tables of learned positions, by module: how many each has. They are looked up by numbers that come from no
    input."""
    found = {}
    for node in nodes:
        if op_name(node) == "embedding":
            table, numbers = named(node, "weight"), named(node, "indices")
            if isinstance(table, fx.Node) and isinstance(numbers, fx.Node) and not comes_from_inputs(numbers):
                found[module_path(node) or table.name] = int(shape_of(table)[0])
    return found


def comes_from_inputs(node: fx.Node) -> bool:
    """Whether it depends on what the program is called with, its parameters and buffers aside."""
    seen, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if one.op == "placeholder" and not (is_parameter(one) or one.meta.get(OF_PROGRAM)):
            return True
        stack += [x for x in one.all_input_nodes if x not in seen]
        seen.update(one.all_input_nodes)
    return False


def is_activation(node: fx.Node) -> bool:
    """Whether a rank has its rows of a floating value."""
    return is_tensor(node) and node.meta.get(PLACEMENT) is not None and value_of(node).is_floating_point()


def cut_length(node: fx.Node) -> int:
    """Of a sequence that begins here, where recurrences alone, or prefix sums, say what the sequence is; else 0."""
    place = node.meta.get(PLACEMENT) if op_name(node) == "scatter" else None
    return place.length if place is not None else 0


def weights_of(made: Compiled) -> dict[fx.Node, tuple[int, int]]:
    """What is made of pairs of rows that are no site, each rank of its queries, and the dims that count them."""
    if made.graph is None:
        return {}
    named = [node for node in made.graph.graph.nodes if node.name in made.weights]
    return {node: made.weights[node.name] for node in named if node.meta.get(PLACEMENT) is not None}


def shapes_of_pairs(node: fx.Node, dims: tuple[int, int]) -> Iterator[Shape]:
    """Of a node, and of what is spread over its heads, such as a mask."""
    whole = shape_of(node)
    first, second = sorted(dim - len(whole) for dim in dims)
    for x in filter(is_tensor, (node, *node.all_input_nodes)):
        sizes = shape_of(x)
        if len(sizes) >= -first and (sizes[first], sizes[second]) == (whole[first], whole[second]):
            yield prod(sizes), (sizes[first], sizes[second])


def sharded(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options, mesh: PretendedMesh
) -> list[Compiled]:
    """Each graph that Dynamo captures, compiled for the sizes of these inputs."""
    run = DryRun(options, mesh, dynamic=False)
    torch.compiler.reset()
    args, kwargs = tree_map_only(torch.Tensor, unmarked, (args, kwargs))
    with errors_of_passes(), dynamo.patched(automatic_dynamic_shapes=False):
        run(model, args, kwargs)
    return run.graphs


def refusals(made: Sequence[Compiled]) -> list[str]:
    """Why sites or graphs are not sharded."""
    found = list[str]()
    for report in (one.report for one in made):
        found += [f"{site.module or 'attention'}: {site.refusal}" for site in report.sites if site.refusal]
        found += [report.refusal] if report.refusal else []
    return found


def unmarked(x: torch.Tensor) -> torch.Tensor:
    """Without what torch._dynamo.mark_dynamic has noted on it: a plan is of numbers."""
    return x.detach().requires_grad_(x.requires_grad) if is_marked_dynamic(x) else x


def sites_of(nodes: Sequence[fx.Node]) -> list[PlannedSite]:
    """Alike ones are one site."""
    found: dict[Case | DilatedCase, PlannedSite] = {}
    for node in nodes:
        case = case_of(node)
        if case is not None:
            seen, module = found.get(case, PlannedSite("", case, 0)), module_path(node) or node.name
            modules = (*seen.modules, module)
            found[case] = PlannedSite(modules[0], case, len(modules), modules)
    return list(found.values())


def case_of(node: fx.Node) -> Case | DilatedCase | None:
    """The attention of a sharded graph's node, as the cost model takes it; None for another node."""
    name = op_name(node)
    if name not in ("ring_attention", "dilated_attention"):
        return None
    training = torch.is_grad_enabled() and requires_grad(node.graph)[node]
    if name == "dilated_attention":
        dilated = DilatedCall.of(node)
        heads = Heads.of(*dilated.values, dilated.kernel)
        return DilatedCase(dilated.pattern, int(dilated.length), heads, training, dilated.strategy)
    ring = RingCall.of(node)
    whole = "queries" if ring.q_layout == "replicated" else "keys" if ring.kv_layout == "replicated" else ""
    heads = Heads.of(*ring.values, ring.kernel)
    if ring.expand:
        heads = expansion_of(ring.expand).expanded(heads)
    return Case(ring.pattern, int(ring.q_length), int(ring.kv_length), heads, training, ring.mask, whole)


def sent_by_others(parts: Sequence[fx.GraphModule], ranks: int, rank: int, rows: int) -> list[Sending]:
    """By `rank` in the partitioned graphs of a program, its attentions aside; gradients of parameters do not grow."""
    found: list[Sending] = []
    for graph in parts:
        leaving = of_parameters(graph.graph) if graph is not parts[0] else set()
        for node in graph.graph.nodes:
            if attends(node) or not sends(node):
                continue
            sent = sending_of(SizedCall.of(node, ranks, rank, rows=rows))
            if sent is not None and sent.bytes:
                found.append(replace(sent, grows=False) if leaving & set(by_storage(node)) else sent)
    return found
