"""From a lowered graph to the numbers of its report: FLOPs, memory and bytes per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import AttentionCall, Call, DilatedCall, RingCall
from ringopt.context_parallel.geometry.dilation import dilation_of, is_dilated
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.dims.contraction import GROUPED
from ringopt.distributed.mesh import Mesh
from ringopt.ir.nodes import is_tensor, op_name, shape_of, source_line, value_of
from ringopt.ir.notes import PARAMETER, PLACEMENT
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import at_hand, formula
from ringopt.ops import operators
from ringopt.ops.all_to_all import bytes_turned
from ringopt.ops.fetch_rows import Wanted, fetch_of
from ringopt.ops.reshard import plan_respread
from ringopt.pipeline import Context
from ringopt.report import Output, Report, Site

CPU = torch.device("cpu")


def report_of(graph: fx.Graph, context: Context, refusal: str | None = None) -> Report:
    """`graph` is flat ATen with fake values; of a graph that was refused before it came so far, pass an empty one."""
    sites = tuple(
        Site(
            info.module, info.form, info.pattern, info.strategy, info.kernel, info.layout, info.refusal,
            info.bytes_sent, tuple(info.notes), info.source, info.not_dilated,
        )
        for info in context.sites.values()
    )  # fmt: skip
    ranks, figures = context.mesh.size, Figures(graph, context.mesh)
    shares = sum(gather.bytes for gather in context.gathers) * (ranks - 1) // ranks
    return Report(
        world_size=ranks,
        sites=sites,
        left_alone=tuple(map(told, context.left_alone)),
        gathers=tuple(context.gathers),
        outputs=tuple(left_outputs(graph, context)),
        sharded_fraction=sharded_fraction(graph, figures),
        memory=memory(graph, figures),
        bytes_sent=sum(site.bytes_sent for site in sites) + shares + fetched(graph, figures),
        refusal=refusal,
        notes=tuple(context.notes),
    )


def left_outputs(graph: fx.Graph, context: Context) -> Iterator[Output]:
    for place, where in context.left.items():
        value = value_of(graph.output_node().args[0][place])
        size = prod(where.size) * value.element_size()
        yield Output(where.name, context.options.outputs, str(where.placement), where.layout, size)


class Figures:
    """Sizes as numbers: open ones as they are for the inputs at hand, on this rank."""

    def __init__(self, graph: fx.Graph, mesh: Mesh):
        self.mesh = mesh
        self.known: dict[Any, int] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = value_of(node)
            for size in [value] if isinstance(value, torch.SymInt) else getattr(value, "shape", ()):
                self.known[formula(size)] = at_hand(size)
        for node in graph.find_nodes(op="call_function", target=operators.rows_here.default):
            length, layout = node.args[:2]
            plan = layout_of(layout, self(length), mesh.size)
            self.known[formula(value_of(node))] = count(plan.ranges(mesh.rank))

    def __call__(self, size: Any) -> int:
        size = value_of(size) if isinstance(size, fx.Node) else size
        return size if isinstance(size, int) else int(formula(size).xreplace(self.known))

    def product(self, sizes: Iterable[Any]) -> int:
        return prod(map(self, sizes))


def told(refused: Refusal) -> str:
    where = source_line(refused.node) if refused.node is not None else ""
    return f"{refused.sentence} ({where})" if where else refused.sentence


def fetched(graph: fx.Graph, figures: Figures) -> int:
    """Bytes of rows that this rank sends because another wants them (ringopt/ops/fetch_rows.py)."""
    total, mesh = 0, figures.mesh
    for node in graph.nodes:
        if op_name(node) == "fetch_rows":
            x, dim, *sizes, form, numbers, _local, layout, _group = node.args
            outer, length, inner = map(figures, sizes)
            wanted = Wanted.of(form, [*map(figures, numbers)])
            plan = fetch_of(wanted, layout, length, mesh.size, mesh.rank, CPU)
            row = value_of(x).element_size() * outer * inner * figures.product(shape_of(x)) // figures(shape_of(x)[dim])
            total += row * sum(len(rows) for _, rows in plan.sends)
        elif op_name(node) == "convolve_rows":
            x, _weight, _bias, dim, length, numbers, *_how, layout, _group = node.args
            plan = fetch_of(
                Wanted.of("halo", [*map(figures, numbers)]), layout, figures(length), mesh.size, mesh.rank, CPU
            )
            row = value_of(x).element_size() * figures.product(shape_of(x)) // figures(shape_of(x)[dim])
            total += row * sum(len(rows) for _, rows in plan.sends)
        elif op_name(node) == "respread":
            x, dim, old, new, _local, *layouts, _group = node.args
            moves = plan_respread(tuple(old), tuple(new), *layouts, mesh.size, mesh.rank, CPU)
            place = value_of(x).element_size() * figures.product(shape_of(x)) // figures(shape_of(x)[dim])
            total += place * sum(len(rows) for _, rows in moves.sends)
        elif op_name(node) == "turn":
            x, _dim, _old, _new_dim, new, _local, _old_layout, layout, _group = node.args
            size = value_of(x).element_size() * figures.product(shape_of(x))
            total += bytes_turned(size, [*map(figures, new)], layout, mesh.size, mesh.rank)
    return total


def sharded_fraction(graph: fx.Graph, figures: Figures) -> float:
    """Of the FLOPs of all products, the share that each rank does for its own rows only."""
    sharded = whole = 0
    for node in graph.nodes:
        flops = matrix_flops(node, figures)
        if any(value.meta.get(PLACEMENT) is not None for value in (node, *node.all_input_nodes)):
            sharded += flops * figures.mesh.size
        else:
            whole += flops
    return sharded / (sharded + whole) if sharded + whole else 0.0


def matrix_flops(node: fx.Node, figures: Figures) -> int:
    """2 * multiplications of one product on this rank; 0 for other ops."""
    name = op_name(node)
    if name in ("linear", "matmul", "mm", "bmm", "mv") or name in GROUPED:
        return 2 * figures.product((*shape_of(node), shape_of(node.args[0])[-1]))
    if name in ("addmm", "baddbmm"):
        return 2 * figures.product((*shape_of(node), shape_of(node.args[1])[-1]))
    if name in ("conv1d", "conv2d", "conv3d", "convolve_rows"):
        return 2 * figures.product((*shape_of(node), *shape_of(node.args[1])[1:]))
    if name == "dilated_attention":
        dilated = DilatedCall.of(node)
        return dilated_flops(dilated, dilated.pattern, dilated.length, figures)
    if name == "ring_attention":
        ring = RingCall.of(node)
        return attention_flops(ring, ring.kv_length, figures)
    if name == "attention":
        call = AttentionCall.of(node)
        queries, keys = call.rows
        if is_dilated(call.pattern):
            return dilated_flops(call, call.pattern, queries, figures)
        return attention_flops(call, keys, figures)
    return 0


def attention_flops(call: Call, keys: Any, figures: Figures) -> int:
    """Of this rank's queries and all keys."""
    batch, heads, rows, width = map(figures, shape_of(call.q))
    return 2 * batch * heads * rows * figures(keys) * (width + figures(shape_of(call.v)[-1]))


def dilated_flops(call: Call, pattern: str, length: Any, figures: Figures) -> int:
    """Of this rank's share of all pairs."""
    batch, heads, rows, width = map(figures, shape_of(call.q))
    pairs = dilation_of(pattern).pairs(figures(length), heads)
    return 2 * batch * pairs * rows // figures(length) * (width + figures(shape_of(call.v)[-1]))


def memory(graph: fx.Graph, figures: Figures) -> dict[str, int]:
    """Bytes on this rank, each memory counted once: what comes in, and all that one forward pass makes."""
    found = {"parameters": 0, "inputs": 0, "sharded values": 0, "replicated values": 0}
    seen: set[int] = set()
    for node in graph.nodes:
        if not is_tensor(node):
            continue
        value = value_of(node)
        storage = value.untyped_storage()._cdata
        if storage in seen:
            continue
        seen.add(storage)
        if node.op == "placeholder":
            cause = "parameters" if node.meta.get(PARAMETER, value.requires_grad) else "inputs"
        else:
            cause = "sharded values" if node.meta.get(PLACEMENT) is not None else "replicated values"
        found[cause] += figures.product(value.shape) * value.element_size()
    return found
