"""Local sizes everywhere, original strides at the outputs.

    gather(linear(scatter(x)))      ->   the same, each node with the fake value it has on this rank,
    output [B, S, D] strided         ->   outputs laid out in memory as the original program returned them
    copy_(weight, y)                ->   copy_(detach(weight), detach(y)), where `weight` has a gradient
    copy_(count, count + 1)         ->   copy_(count, snapshot(count) + 1), where a gradient may read what it was

Every node is run on fake local tensors, once for each kind of operands (ringopt/ir/fake_cache.py), and its size held
against its placement, so that a wrong rule is an error when the graph is compiled and not a wrong number when it runs.
Dynamo compiled the code after this graph for the original strides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from ringopt.ir.autograd_function import GradientArguments, calls_of_graphs, custom_gradients, operands_of
from ringopt.ir.fake_cache import Answers
from ringopt.ir.memory import LOST, laying_out, lies_in_order, storages
from ringopt.ir.nodes import origin, outputs_of, shape_of, value_of
from ringopt.ir.notes import MEMORY, PLACEMENT, STRIDES, Memory
from ringopt.ir.refusal import GraphRefused, Refusal
from ringopt.ir.symbolic_sizes import into_nodes
from ringopt.pipeline import Context, Pass
from ringopt.scans.call import is_scan, keep_states
from ringopt.sharding.input_writes import keep_before_writes, write_unseen
from ringopt.sharding.local_values import LocalValues, as_aot_traces, check_sizes
from ringopt.torch_compat.fake_tensors import FakeTensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Lower(Pass):
    """Gives every node the local size of its placement, and outputs the strides and aliasing of eager."""

    name = "lower"
    reads = ("sites", "scans", "given", "pairs", "cuts", "mixed", "left", "drawn", "improved")

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        write_unseen(gm.graph)
        kept = keep_before_writes(gm.graph)
        changed = context.shards or context.drawn or context.improved or kept
        if not changed and not any(map(is_scan, gm.graph.nodes)):
            return
        inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
        values = map(value_of, gm.graph.nodes)
        mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
        answers = Answers()
        with mode, torch.no_grad(), as_aot_traces(mode):
            LocalValues(gm, answers).run(*inputs)
            for node in custom_gradients(gm.graph):
                given = GradientArguments.of(node)
                LocalValues(node.target.backward, answers).run(*map(value_of, (*given.outputs, *given.saved)))
        for graph in (gm.graph, *(node.target.backward.graph for node in custom_gradients(gm.graph))):
            check_sizes(graph)
        if torch.is_grad_enabled():
            with mode:
                keep_states(gm.graph)
        restore_strides(gm.graph)
        keep_memory(gm.graph, context)
        into_nodes(gm.graph)


def restore_strides(graph: fx.Graph) -> None:
    """As the captured program had them (its values say so no longer: the passes have put others in their places), of
    outputs and of what graphs of higher-order operators read, whose views were made for that."""
    output = graph.output_node()
    found = zip(outputs_of(graph), output.meta[STRIDES], strict=True)
    outputs = [restored(x, stride, output) if stride is not None else x for x, stride in found]
    output.args = (tuple(outputs) if isinstance(output.args[0], (tuple, list)) else outputs[0],)
    for call in calls_of_graphs(graph):
        for x in operands_of(call):
            list(map(int, shape_of(x)))  # its graphs are of the sizes at hand
        operands = zip(operands_of(call), call.target.strides, strict=True)
        call.args = ([restored(x, stride, call) for x, stride in operands],)


def restored(node: fx.Node, stride: tuple[int, ...], reader: fx.Node) -> fx.Node:
    """The value in the order that `stride` has in memory, made before its reader."""
    if lies_in_order(value_of(node), stride):
        return node
    for target, args in laying_out(stride):
        with reader.graph.inserting_before(reader):
            new = reader.graph.call_function(target, (node, *args))
        new.meta = {**node.meta, "val": target(value_of(node), *args)}
        node = new
    return node


def keep_memory(graph: fx.Graph, context: Context) -> None:
    """Outputs share memory with an input or with each other where they did in the captured program, and nowhere else.
    Raises GraphRefused where a pass has taken apart what was one."""
    output, outputs = graph.output_node(), outputs_of(graph)
    inputs = graph.find_nodes(op="placeholder")
    owners: dict[int, Memory] = {}
    for place, node in enumerate(inputs):
        for storage in storages(node):
            owners.setdefault(storage, ("input", place))
    for place, (out, memory) in enumerate(zip(outputs, output.meta[MEMORY], strict=True)):
        rows = memory is not None and (place in context.left or is_rows(memory, inputs, context))
        if memory is None or rows:
            continue
        (storage,) = storages(out)
        found = owners.setdefault(storage, ("output", place))
        if found == memory or (memory[0] == "input" and storage in storages(inputs[memory[1]])):
            continue
        if memory != ("output", place):
            raise GraphRefused(Refusal(LOST.format(out.name), out))
        with graph.inserting_before(output):
            outputs[place] = graph.call_function(aten.clone.default, (out,))
        outputs[place].meta = {**origin(out), "val": torch.empty_like(value_of(out))}
        owners[min(storages(outputs[place]))] = memory
    output.args = (tuple(outputs) if isinstance(output.args[0], (tuple, list)) else outputs[0],)


def is_rows(memory: Memory, inputs: list[fx.Node], context: Context) -> bool:
    """Whether each rank has, or is left with, its rows of what lies there."""
    kind, place = memory
    return inputs[place].meta.get(PLACEMENT) is not None if kind == "input" else place in context.left
