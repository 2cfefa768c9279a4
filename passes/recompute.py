"""What activation checkpointing computes again in the backward, and what it keeps.

    in a region: q, k, v = ...; y = ring_attention(q, k, v); z = f(y)
    kept: what goes into the region, and y with its log-sum-exp; again in the backward: q, k, v, z

An exchange is not repeated: its results are kept, on every rank alike, so that the ranks talk in one order whatever
else a partitioner makes of their graphs; outside of regions too, where a memory budget (activation_memory_budget) would
have it repeat one exchange on one rank and another on the next (a budget of 0 repeats all, alike). So are the seeds of
dropout, a number each. (Korthikanti et al. 2022, Reducing Activation Recomputation, section 5, chooses what to keep in
the same way: what is dear to repeat and small to hold.)

Before: nodes tagged with the numbers of their regions (ir/checkpoint_regions.py).
After: nodes tagged as AOTAutograd's partitioner reads it, exchanges everywhere, and with the policy that it is to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ringopt.ir.nodes import is_random, value_of
from ringopt.ir.notes import POLICY
from ringopt.ops import operators
from ringopt.ops.traits import sends
from ringopt.options import InnerBackend
from ringopt.pipeline import Context, Pass
from ringopt.report import bytes_text
from ringopt.reporting.figures import Figures


@dataclass(frozen=True)
class Recompute(Pass):
    """Has activation checkpointing keep what communicates, so that the backward does not send it again."""

    name = "recompute"
    reads = ("mesh",)
    writes = ("regions", "notes")

    inner_backend: InnerBackend = "inductor"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        tagged = [node for node in gm.graph.nodes if node.meta.get("recompute") is not None]
        exchanges = [node for node in tagged if sends(node)]
        for node in filter(sends, gm.graph.nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in tagged:
            region = context.regions.made[node.meta["ac_graph_id"]]
            node.meta["ac_graph_id"] = region.outermost
            if is_seed(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif not sends(node) and region.policy is not None:
                node.meta[POLICY] = region.policy
        if tagged and context.mesh.size > 1:
            count = len({node.meta["ac_graph_id"] for node in tagged})
            context.notes.append(note(count, exchanges, self.inner_backend, Figures(gm.graph, context.mesh)))


def note(regions: int, exchanges: Sequence[fx.Node], inner_backend: str, figures: Figures) -> str:
    """The note for the report: how many regions, and the bytes that are kept instead of sent again."""
    checkpointed = f"{regions} checkpointed region{'s' if regions > 1 else ''}"
    if inner_backend == "eager":
        return f"{checkpointed}: nothing is computed again, for inner_backend='eager' has no backward graph to do it in"
    kept = bytes_text(sum(size_of(node, figures) for node in exchanges))
    but = f"but for {len(exchanges)} exchanges, whose results are kept: {kept}"
    return f"{checkpointed}: computed again in the backward, {but}"


def size_of(node: fx.Node, figures: Figures) -> int:
    """Bytes of a node's results on this rank."""
    values = value_of(node) if isinstance(value_of(node), (tuple, list)) else [value_of(node)]
    return sum(figures.product(value.shape) * value.element_size() for value in values)


def is_seed(node: fx.Node) -> bool:
    """A random number by itself, or a few, from which operators draw many."""
    value = value_of(node)
    few = node.target is operators.seeds.default or (isinstance(value, torch.Tensor) and not value.dim())
    return is_random(node) and few
