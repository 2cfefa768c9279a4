"""A scan of few steps is compiled step by step on one process: calls of the operator would take longer than they save.

    S, y = ringopt::scan([S0], [a, b, c with dim 1 in front], [], body)                     # of two steps
        ->
    S1 = S0 * a[0] + b[0];  y0 = S1 @ c[0]
    S2 = S1 * a[1] + b[1];  y1 = S2 @ c[1];  y = stack([y0, y1])

The operator calls its compiled body once a step, which takes a third of a millisecond beside the step's products. For
up to FEW steps Inductor fuses the steps with what is around them and keeps what the backward needs, so that a step of
training is as fast, as small and as soon compiled as that of the program as written. Longer scans stay one node, and so
does a scan of any number of steps.

After: the results lie in memory as those of the scan, and none is an operand.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.ir.nodes import emit, is_aten, origin, value_of
from ringopt.ir.symbolic_sizes import is_open
from ringopt.options import InnerBackend
from ringopt.pipeline import Context, Pass
from ringopt.scans.call import ScanCall, is_scan

aten = torch.ops.aten
FEW = 16  # steps; of 32 Inductor compiles longer than of the scan, and is as fast


@dataclass(frozen=True)
class UnrollScan(Pass):
    """Writes short scans out again, on CPUs and with the inner backend "inductor"."""

    name = "unroll_scan"
    reads = ("mesh",)
    writes = ("improved", "notes")
    optional = True
    lost = "short scans are calls of an operator, which are slower on one process than their steps compiled together"

    inner_backend: InnerBackend = "inductor"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.mesh.size > 1:
            return
        short = [node for node in gm.graph.nodes if is_scan(node) and self.is_short(ScanCall.of(node))]
        for node in short:
            write_out(gm.graph, node, ScanCall.of(node))
        if short:
            context.improved = True
            context.notes.append(f"{len(short)} of the scans have at most {FEW} steps, which are compiled together")

    def is_short(self, call: ScanCall) -> bool:
        """Whether its steps are known and few."""
        steps, device = call.steps.length, value_of(call.xs[0]).device.type
        return self.inner_backend == "inductor" and device == "cpu" and not is_open(steps) and 0 < steps <= FEW


def write_out(graph: fx.Graph, node: fx.Node, call: ScanCall) -> None:
    """Puts the steps of a scan in its place."""
    items = {item: item.args[1] for item in node.users}
    carries, ys = list(call.init), list[Sequence[fx.Node]]()
    with graph.inserting_before(node):
        for step in range(call.steps.length):
            rows = [emit(graph, aten.select.int, (x, 0, step), node) for x in call.xs]
            results = one_step(graph, call, [*carries, *rows, *call.consts], node)
            carries = results[: len(carries)]
            ys.append(results[len(carries) :])
        for item, place in items.items():
            if item.users:
                item.replace_all_uses_with(result(graph, carries, ys, place, node))
    for item in items:
        graph.erase_node(item)
    graph.erase_node(node)


def result(
    graph: fx.Graph, carries: Sequence[fx.Node], ys: Sequence[Sequence[fx.Node]], place: int, like: fx.Node
) -> fx.Node:
    """One of the scan's results: a last carry, or the ys of all steps, stacked."""
    if place >= len(carries):
        return emit(graph, aten.stack.default, ([each[place - len(carries)] for each in ys],), like)
    contiguous = {"memory_format": torch.contiguous_format}
    return emit(graph, aten.clone.default, (carries[place],), like, contiguous)


def one_step(graph: fx.Graph, call: ScanCall, operands: Sequence[fx.Node], like: fx.Node) -> list[fx.Node]:
    """The carries and ys of one step, computed by nodes of the graph."""
    new = dict(zip(call.body.inputs, operands, strict=True))
    for node in call.body.module.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), new.__getitem__)
            new[node] = emit(graph, node.target, args, like, kwargs) if is_aten(node) else item(graph, *args)
    return [new[out] for out in call.body.outputs]


def item(graph: fx.Graph, results: fx.Node, place: int) -> fx.Node:
    """One of several results."""
    new = graph.call_function(operator.getitem, (results, place))
    new.meta = {**origin(results), "val": value_of(results)[place]}
    return new
