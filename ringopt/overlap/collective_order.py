"""One order of communication on all ranks, whatever a compiler makes of the graph.

The sharded graphs of two ranks differ in sizes where the tokens do not divide evenly, and Inductor orders and fuses by
size: of two independent messages one rank would send the first first, another the second, and both would deadlock. Here
each operator that communicates is made to depend on the one before it, in the forward graph and in the backward one.
"""

from __future__ import annotations

from itertools import pairwise

import torch.fx as fx

from ringopt.ops.traits import talks
from ringopt.torch_compat.inductor_passes import CustomGraphPass, OrderedSet, preserve_node_ordering


class Lockstep(CustomGraphPass):
    """Runs after Inductor's own passes over a graph."""

    def __call__(self, graph: fx.Graph) -> None:
        preserve_node_ordering(graph, self.ties(graph))

    def ties(self, graph: fx.Graph) -> dict[fx.Node, OrderedSet[fx.Node]]:
        """Node -> nodes that must have run before it, in the order of the graph."""
        talk = [node for node in graph.nodes if talks(node)]
        return {after: OrderedSet([before]) for before, after in pairwise(talk)}

    def uuid(self) -> str:
        return "ringopt lockstep 1"  # compiled code is cached by it

