"""From a lowered graph to the numbers of its report: FLOPs, memory and bytes per rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.compare.mask_picture import mask_picture
from ringopt.compare.node_facts import ATTENTION, SPREAD, qualified
from ringopt.compare.node_views import module_of
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.mesh import Mesh, PretendedMesh
from ringopt.ir.nodes import arguments_of, is_tensor, module_path, op_name, outputs_of, source_line, value_of
from ringopt.ir.notes import OF_PROGRAM, PARAMETER, PLACEMENT
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import Linear, at_hand, formula
from ringopt.ops import operators
from ringopt.ops.sized_call import Open, SizedCall
from ringopt.ops.traffic import ring_plan
from ringopt.ops.traits import flops_of, sends, sent_bytes
from ringopt.options import note_of
from ringopt.output.drawn import MaskPicture, ModuleFigures
from ringopt.output.printable import logger
from ringopt.pipeline import Context
from ringopt.report import Gather, Output, Report, Site
from ringopt.rules.declare import declaration_of, is_foreign
from ringopt.torch_compat.tensors import storage_key

log = logger(__name__)

FLOPS_PER_BYTE = 100  # of a product while a byte is sent: few, so that gathers do not count for more than they take


def report_of(graph: fx.Graph, context: Context, refusal: str | None = None) -> Report:
    """`graph` is flat ATen with fake values; of a graph that was refused before it came so far, pass an empty one."""
    spread = {(node.name, node.target) for node in graph.nodes if node.meta.get(PLACEMENT) is not None}
    figures = Figures(graph, context.mesh)
    pictures = pictures_of(graph, context, figures)
    sites = tuple(
        Site(
            info.module, info.form, info.pattern, info.strategy, info.shown_kernel, info.layout, info.refusal,
            info.bytes_sent, tuple(info.notes), info.source, info.not_dilated,
            info.refusal is not None and (node.name, node.target) in spread, info.predictions, pictures.get(node),
        )
        for node, info in (*context.sites.items(), *context.scans.items())
    )  # fmt: skip
    ranks = context.mesh.size
    outside = note_of(context.options)
    sharded, whole = matrix_work(graph, figures)
    flops = sharded + sum(whole.values())
    return Report(
        world_size=ranks,
        sites=sites,
        left_alone=tuple(map(with_place, context.left_alone)),
        gathers=tuple(context.gathers),
        outputs=tuple(left_outputs(graph, context)),
        sharded_fraction=sharded / flops if flops else 0.0,
        memory=memory(graph, figures),
        bytes_sent=sent_by(graph, figures),
        refusal=refusal,
        notes=(*context.notes, *([outside] if outside else []), *uncounted_work(graph, figures)),
        matrix_flops=flops,
        heaviest=max(whole, key=whole.__getitem__, default=""),
        modules=module_figures(graph, context, figures),
        unknown=tuple(dict.fromkeys(called_at(node) for node in graph.nodes if is_unknown(node))),
    )


def pictures_of(graph: fx.Graph, context: Context, figures: Figures) -> dict[fx.Node, MaskPicture]:
    """Of the sites that are spread, which stand in the graph in their order, and of those that still stand there."""
    lowered = [node for node in graph.nodes if qualified(node) in SPREAD]
    spread = [node for node, info in context.sites.items() if info.refusal is None]
    pairs = zip(spread, lowered, strict=True) if len(spread) == len(lowered) else ()
    left = [node for node in graph.nodes if node in context.sites and qualified(node) in ATTENTION]
    found = {}
    for site, node in (*pairs, *zip(left, left, strict=True)):
        try:
            plan = ring_plan(figures.call(node)) if qualified(node) == SPREAD[0] else None
            picture = mask_picture(qualified(node), arguments_of(node), plan, figures)
        except Exception as error:  # a picture decides nothing: the program is compiled without it
            log.warning("the mask of %s is not drawn: %s: %s", node.name, type(error).__name__, error)
            continue
        if picture is not None:
            found[site] = picture
    return found


def module_figures(graph: fx.Graph, context: Context, figures: Figures) -> tuple[ModuleFigures, ...]:
    """In the order of `turns`; what belongs to no module is one of its own, ""."""
    parts: dict[str, Counter[str]] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        flops, spread = matrix_flops(node, figures), is_spread(node)
        part = parts.setdefault(module_of(node), Counter())
        part.update(nodes=1, flops=flops, whole=0 if spread else flops)
        part["sent"] += sent_bytes(figures.call(node)) if sends(node) else 0
        if is_tensor(node) and storage_key(value_of(node)) not in seen:
            seen.add(storage_key(value_of(node)))
            part["held"] += figures.product(value_of(node).shape) * value_of(node).element_size()
    for gather in context.gathers:
        if gather.module in parts:
            parts[gather.module]["gathered"] += gather.bytes
    seconds, turn = seconds_of(context), turns(graph)
    parts = dict(sorted(parts.items(), key=lambda of: turn.get(of[0], 0)))
    return tuple(ModuleFigures(name, **part, seconds=seconds.get(name, 0.0)) for name, part in parts.items())


def turns(graph: fx.Graph) -> dict[str, int]:
    """When a module first computes something from the program's inputs, or else is first read by what does: what is
    made of parameters alone stands anywhere in a graph."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    inputs = [node for node in graph.find_nodes(op="placeholder") if is_tensor(node)]
    fed = {node for node in inputs if not is_parameter(node)}
    for node in place:
        if not fed.isdisjoint(node.all_input_nodes):
            fed.add(node)
    found: dict[str, int] = {}
    for node in place:
        if node in fed:
            found.setdefault(module_of(node), place[node])
    turn: dict[fx.Node, int] = {}
    late: dict[str, int] = {}
    for node in reversed(place):
        turn[node] = place[node] if node in fed else min((turn[user] for user in node.users), default=place[node])
        late[module_of(node)] = min(turn[node], late.get(module_of(node), turn[node]))
    return {**late, **found}


def is_parameter(node: fx.Node) -> bool:
    """Of an input that is a tensor."""
    return bool(node.meta.get(PARAMETER, value_of(node).requires_grad))


def seconds_of(context: Context) -> dict[str, float]:
    """Predicted, of the attentions of each module whose strategies were compared."""
    found: dict[str, float] = {}
    for info in context.sites.values():
        if info.predictions:
            found[info.module] = found.get(info.module, 0.0) + info.predictions[0].seconds
    return found


def is_spread(node: fx.Node) -> bool:
    """Whether each rank computes its own rows of it."""
    return any(value.meta.get(PLACEMENT) is not None for value in (node, *node.all_input_nodes))


def left_outputs(graph: fx.Graph, context: Context) -> Iterator[Output]:
    """For the report: outputs that every rank has only its shard of, with the bytes of the gathered tensor."""
    for place, where in context.left.items():
        value = value_of(outputs_of(graph)[place])
        where = where.with_sizes(at_hand)
        size = prod(where.size) * value.element_size()
        yield Output(where.name, context.options.outputs, str(where.placement), where.layout, size)


class Figures:
    """Sizes as numbers: symbolic ones by their hints, the sizes of the example inputs, on this rank."""

    def __init__(self, graph: fx.Graph, mesh: Mesh):
        self.mesh = mesh
        self.known: dict[Any, int] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = value_of(node)
            self.known |= Linear.counts([value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ()))
        for node in graph.find_nodes(op="call_function", target=operators.rows_here.default):
            call = OpCall.of(node)
            plan = layout_of(call["layout"], self(call["length"]), mesh.size)
            self.known[formula(value_of(node))] = count(plan.ranges(mesh.rank))

    def __call__(self, size: Any) -> int:
        size = value_of(size) if isinstance(size, fx.Node) else size
        return size if isinstance(size, int) else int(formula(size).xreplace(self.known))

    def call(self, node: fx.Node) -> SizedCall:
        return SizedCall.of(node, self.mesh.size, self.mesh.rank, number=self)

    def product(self, sizes: Iterable[Any]) -> int:
        return prod(map(self, sizes))


def with_place(refused: Refusal) -> str:
    """The sentence, and the module and source line of its node where it does not name them."""
    if refused.node is None:
        return refused.sentence
    where = [at for at in (module_path(refused.node), source_line(refused.node)) if at and at not in refused.sentence]
    return f"{refused.sentence} ({', '.join(where)})" if where else refused.sentence


def sent_by(graph: fx.Graph, figures: Figures) -> int:
    """Bytes that this rank sends in one forward."""
    return sum(sent_bytes(figures.call(node)) for node in graph.nodes if sends(node))


@dataclass(frozen=True)
class MatrixWork:
    """Matrix FLOPs: `whole` are those that every rank does, `total` all of the program's, as rank 0 counts them;
    `gathered`: bytes of what is made whole on the way. All ranks decide alike by these numbers."""

    whole: int
    total: int
    gathered: int = 0

    @classmethod
    def of(cls, graph: fx.Graph, ranks: int, gathers: Iterable[Gather]) -> MatrixWork:
        sharded, whole = matrix_work(graph, Figures(graph, PretendedMesh(0, ranks)))
        gathered = sum(gather.bytes for gather in gathers if gather.op != "output")
        return cls(sum(whole.values()), sharded + sum(whole.values()), gathered)

    def per_rank(self, ranks: int) -> float:
        """FLOPs of a rank: those that it does with the others, its part of the rest, and as many as it could do while
        the gathers send."""
        return self.whole + (self.total - self.whole) / ranks + FLOPS_PER_BYTE * self.gathered


def matrix_work(graph: fx.Graph, figures: Figures) -> tuple[int, Counter[str]]:
    """FLOPs of all products: of those that each rank does for its own rows only, over all ranks; and of those that
    every rank does whole, once, by module and source line."""
    sharded, whole = 0, Counter[str]()
    for node in graph.nodes:
        flops = matrix_flops(node, figures)
        if is_spread(node):
            sharded += flops * figures.mesh.size
        elif flops:
            whole[place_of(node)] += flops
    return sharded, whole


def is_unknown(node: fx.Node) -> bool:
    """Whether a node calls an operator of another library that no rule describes."""
    return is_foreign(node) and declaration_of(node) is None


def called_at(node: fx.Node) -> str:
    """`mylib::attend in blocks.0 (model.py:12)`, as far as it is known."""
    module, line = module_path(node), ":".join(source_line(node).split(":")[:2])
    return op_name(node) + (f" in {module}" if module else "") + (f" ({line})" if line else "")


def place_of(node: fx.Node) -> str:
    """`mlp.fc1 (model.py:12: h = self.fc1(x))`, as far as it is known."""
    module, line = module_path(node), source_line(node)
    module = f"module {module}" if module.isdecimal() else module  # of an nn.Sequential, whose modules are numbers
    return f"{module} ({line})" if module and line else module or line or op_name(node)


def matrix_flops(node: fx.Node, figures: Figures) -> int:
    """2 * multiplications of the products of a node on this rank; 0 for other ops, and where these products have sizes
    that nothing foretells (of the numbers that torch.unique finds)."""
    try:
        return flops_of(node, figures.call(node))
    except Open:
        return 0


def uncounted_work(graph: fx.Graph, figures: Figures) -> list[str]:
    """Of which nodes the share of matrix work leaves products out."""
    found = []
    for node in graph.nodes:
        try:
            flops_of(node, figures.call(node))
        except Open as error:
            found.append(f"the matrix work of {place_of(node)} is not counted: its sizes follow from {error}")
    return list(dict.fromkeys(found))


def memory(graph: fx.Graph, figures: Figures) -> dict[str, int]:
    """Bytes on this rank, each memory counted once: what comes in, and all that one forward pass makes."""
    found = {"parameters": 0, "buffers": 0, "inputs": 0, "sharded values": 0, "replicated values": 0}
    seen: set[int] = set()
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        value = value_of(node)
        storage = storage_key(value)
        if storage in seen:
            continue
        seen.add(storage)
        if node.op == "placeholder":
            cause = "parameters" if is_parameter(node) else "buffers" if node.meta.get(OF_PROGRAM) else "inputs"
        else:
            cause = "sharded values" if node.meta.get(PLACEMENT) is not None else "replicated values"
        found[cause] += figures.product(value.shape) * value.element_size()
    return found
