"""Inputs, nodes and outputs in an order that follows from what the program computes, and from nothing else.

    m0 = mask(0); m1 = mask(1); f(x, m1) + g(x, m0)   ->   m = mask(1); m_1 = mask(0); f(x, m) + g(x, m_1)

A model that goes through a set makes its nodes in another order in every process, and Dynamo finds its inputs and
outputs in that order. What the passes behind this one decide in the order of the graph (which site is first, which
messages follow each other, what shares a bucket) they then decide alike on all ranks.

Before: a functional graph, in which a value may be read anywhere. After: the canonical order (ir/canonical_order.py),
with names by it; `context.program` is the text that the ranks compare. How the program is called and what it returns
is permuted as well until the last pass is done (`Order`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch.fx as fx

from ringopt.ir.autograd_function import custom_gradients
from ringopt.ir.canonical_order import canonical_order, program_of
from ringopt.ir.checkpoint_regions import Region, Regions
from ringopt.ir.io_order import Order
from ringopt.ir.nodes import readable_name
from ringopt.ir.notes import INPUT
from ringopt.pipeline import Context, Pass
from ringopt.torch_compat.fx import fresh_names, has_buffer


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Orders nodes, inputs and outputs by what is computed, so that all ranks have one graph."""

    name = "canonicalize"
    writes = ("order", "program", "regions")

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        for node in custom_gradients(gm.graph):
            # Its inputs and outputs are at the places where the node has them.
            inner = node.target.backward
            put(inner, canonical_order(inner.graph, in_place=True)[0])
            rename(inner.graph)
        nodes, outputs = canonical_order(gm.graph)
        before = gm.graph.find_nodes(op="placeholder")
        renumber(context.regions, nodes)
        put(gm, nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        context.order = Order(tuple(map(before.index, inputs)), tuple(outputs))
        context.order.apply(gm.graph)
        rename(gm.graph)
        context.program = program_of(gm.graph, nodes)


def put(gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Moves `nodes` into this order, and the users of each as well, which passes iterate over."""
    end = gm.graph.output_node()
    for node in nodes:
        if node.op != "placeholder":
            end.prepend(node)
    rename_constants(gm, nodes)
    place = {node: number for number, node in enumerate([*nodes, end])}
    for node in nodes:  # fx keeps them in the order in which they were made
        users = sorted(node.users, key=place.__getitem__)
        node.users.clear()
        node.users.update(dict.fromkeys(users))


def rename(graph: fx.Graph) -> None:
    """Each node is called after its operator, and numbered anew."""
    names = fresh_names(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            base = readable_name(node.meta.get(INPUT, node.name))
        else:
            base = node.target if node.op == "get_attr" else re.sub(r"_\d+$", "", node.name)
        node.name = names.create_name(base, node)
        if node.op == "placeholder":
            node.target = node.name


NUMBERED = re.compile(r"_tensor_constant\d+")


def rename_constants(gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Tensors that the tracer found and numbered."""
    read = [node for node in nodes if node.op == "get_attr" and NUMBERED.fullmatch(node.target)]
    names = {node.target: "" for node in read}
    held = {name: getattr(gm, name) for name in names}
    buffers = {name for name in names if has_buffer(gm, name)}
    for name in names:
        delattr(gm, name)
    for number, name in enumerate(names):
        names[name] = f"_tensor_constant{number}"
        if name in buffers:
            gm.register_buffer(names[name], held[name])
        else:
            setattr(gm, names[name], held[name])
    for node in read:
        node.target = names[node.target]


def renumber(regions: Regions, nodes: list[fx.Node]) -> None:
    """Checkpointed regions, in an order in which each comes behind those that it reads from: AOTAutograd's partitioner
    goes by it. They come in the order in which the last nodes of the outermost ones do, as far as they may."""
    if not regions.made:
        return
    reads: dict[int, set[int]] = {}
    behind: dict[fx.Node, set[int]] = {}
    for node in nodes:
        found = set().union(*(behind[arg] for arg in node.all_input_nodes))
        if "ac_graph_id" in node.meta:
            outermost = regions.made[node.meta["ac_graph_id"]].outermost
            reads.setdefault(outermost, set()).update(found - {outermost})
            found = found | {outermost}
        behind[node] = found
    order: list[int] = []
    while len(order) < len(reads):
        order.append(next(number for number in reads if number not in order and reads[number] <= set(order)))
    entered = dict.fromkeys(node.meta["ac_graph_id"] for node in nodes if "ac_graph_id" in node.meta)
    numbers = {number: place for place, number in enumerate([*order, *(n for n in entered if n not in reads)])}
    made = {new: regions.made[old] for old, new in numbers.items()}
    regions.made.clear()
    for number, region in made.items():
        regions.made[number] = Region(numbers[region.outermost], region.policy)
        if region.policy is not None:
            region.policy.ac_graph_id = numbers[region.outermost]  # type: ignore[attr-defined]
    for node in nodes:
        if "ac_graph_id" in node.meta:
            node.meta["ac_graph_id"] = numbers[node.meta["ac_graph_id"]]
