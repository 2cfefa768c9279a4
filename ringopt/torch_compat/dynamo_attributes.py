"""Tensors that Dynamo's graph holds and reads by name, where it guards that they are the same ones at each call: the
weights and the states of an optimizer whose step is compiled, and what `mark_static_address(x, guard=True)` marks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

__all__ = ["followed_by", "with_attributes_as_inputs"]

OF_DYNAMO = "dynamo_compile_id"  # by which AOTAutograd takes a graph for one of Dynamo's, with a source of each input


def with_attributes_as_inputs(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A graph that takes them behind its other inputs, and these tensors: they change from call to call as inputs do,
    and may be written. `gm` itself where there are none."""
    read = [(node, attrgetter(str(node.target))(gm)) for node in gm.graph.find_nodes(op="get_attr")]
    read = [(node, value) for node, value in read if isinstance(value, torch.Tensor)]
    if not read:
        return gm, []
    graph, copies, held = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, tuple[fx.Node, torch.Tensor]]()
    for node in gm.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    for node, value in read:
        if node.target not in held:
            held[node.target] = graph.placeholder(node.name), value
            source = getattr(gm, "_param_name_to_source", {}).get(node.target)
            held[node.target][0].meta = {**node.meta, "grapharg": SimpleNamespace(source=source)}
        copies[node] = held[node.target][0]
    graph.output(graph.graph_copy(gm.graph, copies)).meta = gm.graph.output_node().meta
    made = fx.GraphModule(gm, graph)
    made.meta = {key: value for key, value in gm.meta.items() if key != OF_DYNAMO}
    return made, [value for _, value in held.values()]


def followed_by(run: Callable[..., Any], held: list[torch.Tensor]) -> Callable[..., Any]:
    """`run`, which takes these tensors behind its other inputs."""
    return (lambda *inputs: run(*inputs, *held)) if held else run
