"""All ranks must talk in one order, whatever a compiler makes of the graph.

The sharded graphs of two ranks differ in sizes where the rows do not divide evenly, and Inductor orders and fuses by
size: of two messages that do not depend on each other one rank would send the first first, another the second, and both
would wait for ever. Here each operator of ours is made to depend on the one before it, in forward and backward graphs.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet


class Lockstep(CustomGraphPass):
    """Runs after Inductor's own passes over a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        ours = [node for node in graph.nodes if is_ours(node)]
        preserve_node_ordering(graph, {after: OrderedSet([before]) for before, after in pairwise(ours)})

    def uuid(self) -> str:
        return "ringopt lockstep 1"  # compiled code is cached by it


def is_ours(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "ringopt"


def inductor_settings() -> dict[str, Any]:
    """For compile_fx, which hands them to the backward too, however late that is compiled. What Inductor reorders to
    save memory it reorders by sizes, and these differ by rank."""
    return {"post_grad_custom_post_pass": Lockstep(), "reorder_for_peak_memory": False}
