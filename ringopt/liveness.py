"""How much memory a step holds at once, read off the forward and backward graphs that AOTAutograd makes of a graph.

Nothing runs: values are fake. A buffer lives from the node that makes it to its last reader. Pointwise results that
only pointwise nodes and reductions read are taken to be fused away, as Inductor does; what an attention holds inside
its operator is not seen here (attention/predict.py has it).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.decomposition import select_decomp_table

from ringopt.graph.nodes import op_name


@dataclass(frozen=True)
class Live:
    """Bytes. `parameters`: what comes in and has a gradient, `gradients`: theirs; `forward`, `backward`: the most that
    a graph holds at once beside these, what is `saved` between them included; `at_attention`: the same, at the
    attentions only, without what these make."""

    parameters: int
    gradients: int
    saved: int
    forward: int
    backward: int
    at_attention: int
    at_attention_backward: int

    @property
    def step(self) -> int:
        return max(self.forward, self.backward)


def live_of(flat: fx.GraphModule, parts: Sequence[fx.GraphModule], rows: int) -> Live:
    """Of a graph of fake values, with sizes that are numbers, and its `partitioned` graphs. What has no more elements
    than a rank has `rows` does not grow with the sequence, and is not counted."""
    forward, backward = (*parts, None)[:2]
    assert forward is not None
    given = [node.meta["val"] for node in flat.graph.find_nodes(op="placeholder")]
    learned = sum(size_of(x) for x in given if isinstance(x, torch.Tensor) and x.requires_grad)
    first, first_at = peak(forward.graph, {}, small(forward.graph, rows))
    if backward is None:
        return Live(learned, 0, 0, first, 0, first_at, 0)
    kept = own(forward.graph)
    saved = [node for node in backward.graph.find_nodes(op="placeholder") if kept.get(node.name)]
    held = {storage: size for node in saved for storage, size in sizes(node).items()}
    last, last_at = peak(backward.graph, held, of_parameters(backward.graph) | small(backward.graph, rows))
    total = {storage: size for node in saved for storage, size in kept[node.name].items()}
    gradients = sum(sum(found.values()) for found in own(backward.graph).values())
    return Live(learned, gradients, sum(total.values()), first, last, first_at, last_at)


def small(graph: fx.Graph, rows: int) -> set[int]:
    """Storages of at most `rows` numbers of 8 bytes."""
    return {storage for node in graph.nodes for storage, size in sizes(node).items() if size <= 8 * rows}


def of_parameters(backward: fx.Graph) -> set[int]:
    """Storages of gradients that leave the graph, and of the parts that are reduced to them."""
    found = {storage for outputs in own(backward).values() for storage in outputs}
    for node in backward.nodes:
        if op_name(node) in ("reduce_from_group", "reduce_bucket"):
            found.update(storage for x in (node, *node.all_input_nodes) for storage in sizes(x))
    return found


def partitioned(flat: fx.GraphModule) -> list[fx.GraphModule]:
    """The forward and, where something has a gradient, the backward, split as Inductor has them split."""
    graphs: list[fx.GraphModule] = []

    def split(joint: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        parts = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)
        graphs.extend(parts)
        return parts

    def compiled(gm: Any, example_inputs: Sequence[Any]) -> Any:
        if not graphs:
            graphs.append(gm)
        return lambda *_: None

    inputs = [node.meta["val"] for node in flat.graph.find_nodes(op="placeholder")]
    mode = next(x.fake_mode for x in inputs if isinstance(x, torch._subclasses.FakeTensor))
    with tracing(TracingContext(mode)):
        aot_module_simplified(
            flat, inputs, compiled, compiled, split, decompositions=select_decomp_table(), inference_compiler=compiled
        )
    return graphs


def peak(graph: fx.Graph, saved: dict[int, int], beside: Collection[int] = ()) -> tuple[int, int]:
    """The most bytes live at once, at any node and at attentions. `saved`: by storage, live when the graph begins and
    freed when it was last read; other inputs, and storages `beside`, are not counted."""
    nodes = list(graph.nodes)
    last: dict[int, int] = {}
    for place, node in enumerate(nodes):
        last.update((storage, place) for x in (node, *node.all_input_nodes) for storage in sizes(x))
    outer = set(beside) | {storage for node in graph.find_nodes(op="placeholder") for storage in sizes(node)}
    alive = dict(saved)
    most = attention = 0
    for place, node in enumerate(nodes):
        if pointwise(node) and not fused(node):  # written over a result of its size that nobody reads any more
            own, size = next(iter(sizes(node).items()))
            over = (s for x in node.all_input_nodes for s in sizes(x) if last[s] == place and alive.get(s) == size)
            alive.pop(next(over, own), None)
        if node.op == "call_function" and not fused(node):
            alive.update((storage, size) for storage, size in sizes(node).items() if storage not in outer)
        most = max(most, sum(alive.values()))
        if op_name(node).startswith("ring_attention"):
            attention = max(attention, sum(size for storage, size in alive.items() if storage not in sizes(node)))
        for value in (node, *node.all_input_nodes):
            for storage in sizes(value):
                if last[storage] == place:
                    alive.pop(storage, None)
    return most, attention


def fused(node: fx.Node) -> bool:
    """A pointwise result that nobody needs in memory."""
    return pointwise(node) and all(pointwise(user) or reduction(user) for user in node.users)


def pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def reduction(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def own(graph: fx.Graph) -> dict[str, dict[int, int]]:
    """Bytes by storage of each output that the graph made itself, by name."""
    outer = {storage for node in graph.find_nodes(op="placeholder") for storage in sizes(node)}
    nodes = (node for node in graph.output_node().all_input_nodes if node.op != "placeholder")
    return {node.name: {s: size for s, size in sizes(node).items() if s not in outer} for node in nodes}


def sizes(node: fx.Node) -> dict[int, int]:
    """Bytes by storage."""
    return {x.untyped_storage()._cdata: size_of(x) for x in tensors_of(node)}


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, torch.Tensor)]


def size_of(value: Any) -> int:
    return int(value.untyped_storage().nbytes()) if isinstance(value, torch.Tensor) else 0
