"""One order of communication on all ranks, whatever a compiler makes of the graph.

The sharded graphs of two ranks differ in sizes where the tokens do not divide evenly, and Inductor orders and fuses by
size: of two independent messages one rank would send the first first, another the second, and both would deadlock. Here
each operator that communicates is made to depend on the one before it, in the forward graph and in the backward one.

Which graph it is in does not depend on sizes either. What a backward computes of saved values alone (that of an
autograd.Function that shifts what it saved), a partitioner may put into the forward, where its result is the smaller
one to keep: on one rank, and on the next it is not. What communicates there stays in the backward, as in eager code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ringopt.ops.traits import talks
from ringopt.torch_compat.aot_autograd import is_of_backward, min_cut_rematerialization_partition
from ringopt.torch_compat.inductor_passes import (
    CustomGraphPass,
    CustomPartitionerFn,
    OrderedSet,
    preserve_node_ordering,
)


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


class Split(CustomPartitionerFn):
    """Splits a joint graph into a forward and a backward: by `inner` (None: torch's partitioner of least saved memory),
    but for what communicates, which is in the graph in which autograd has traced it."""

    def __init__(self, inner: CustomPartitionerFn | None = None):
        self.inner = inner

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **how: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        for node in gm.graph.nodes:
            if talks(node) and is_of_backward(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        split: Any = self.inner or min_cut_rematerialization_partition
        parts: tuple[fx.GraphModule, fx.GraphModule] = split(gm, joint_inputs, **how)
        return parts

    def uuid(self) -> Any:
        return "ringopt split 1", self.inner and self.inner.uuid()
