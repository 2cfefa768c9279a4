"""Activation checkpointing, as tags on nodes.

    y = checkpoint(f, x)   ->   the nodes of f in line, each tagged: recompute in the backward

The tags are torch's own ("recompute" and "ac_graph_id" of node.meta), which AOTAutograd's partitioner follows: it saves
the inputs of a region and repeats the tagged nodes in the backward. Here "ac_graph_id" is the number of a Region until
the sharded graph is done, so that nested regions stay distinct (passes/recompute.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ringopt.ir.notes import POLICY
from ringopt.ir.refusal import Refusal
from ringopt.torch_compat.autograd import CachingTorchDispatchMode
from ringopt.torch_compat.tensors import TorchDispatchMode

Contexts = Callable[[], tuple[Any, Any]]


@dataclass(frozen=True)
class Region:
    """One call of `checkpoint`. `outermost` is the number of the region that all regions around it are in: what is
    saved is the inputs of that one. `policy` decides op by op what else is saved; None: nothing."""

    outermost: int
    policy: TorchDispatchMode | None = None


@dataclass(frozen=True, eq=False)
class WrittenOut:
    """A call of `checkpoint` whose body stands in line in Dynamo's graph already, `within` that of another."""

    contexts: Contexts | None
    within: WrittenOut | None


@dataclass
class Regions:
    """The regions of one graph, in the order in which they are entered."""

    made: dict[int, Region] = field(default_factory=dict)
    written_out: dict[WrittenOut, int | Refusal] = field(default_factory=dict)

    def entered(self, call: WrittenOut, around: int | None) -> int | Refusal:
        """The number of the region that `call` is, in a graph inside `around`."""
        if call not in self.written_out:
            outer = self.entered(call.within, around) if call.within is not None else around
            self.written_out[call] = outer if isinstance(outer, Refusal) else self.enter(call.contexts, outer)
        return self.written_out[call]

    def enter(self, contexts: Contexts | None, around: int | None) -> int | Refusal:
        """The number of a new region inside `around`. `contexts` is the `context_fn` of its checkpoint."""
        number = len(self.made)
        region = Region(self.made[around].outermost if around is not None else number)
        if contexts is not None:
            forward, _again = contexts()
            if not isinstance(forward, CachingTorchDispatchMode):
                return Refusal(
                    "the context_fn of a checkpoint gives a context other than those of "
                    f"create_selective_checkpoint_contexts: {type(forward).__name__}"
                )
            forward.ac_graph_id = region.outermost  # it tags what it is asked about
            region = Region(region.outermost, forward)
        self.made[number] = region
        return number


def tags(number: int) -> dict[str, Any]:
    """The meta that torch's partitioner reads, for a node of region `number`."""
    return {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": number}


def tags_of(gm: fx.GraphModule) -> str:
    """A digest of the tags of a graph, which its text does not hold."""
    tagged = [
        (place, node.meta.get("ac_graph_id"), node.meta["recompute"].name)
        for place, node in enumerate(gm.graph.nodes)
        if "recompute" in node.meta
    ]
    return hashlib.blake2b(repr(tagged).encode(), digest_size=8).hexdigest()


class Policed:
    """An operator in a region with a policy: the policy is asked about each of the operators it consists of, as torch
    asks it (tag_activation_checkpoint in torch/_higher_order_ops/wrap.py)."""

    def __init__(self, target: Callable[..., Any], policy: TorchDispatchMode):
        self.target, self.policy = target, policy
        self.__name__ = self.__qualname__ = getattr(target, "__name__", "operator")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.policy:
            return self.target(*args, **kwargs)


def police(gm: fx.GraphModule) -> None:
    """Wraps the operators of regions with a policy, so that it is asked when AOTAutograd traces `gm`: only there the
    graph consists of the operators that policies know."""
    for node in gm.graph.nodes:
        policy = node.meta.pop(POLICY, None)
        if policy is not None:
            node.target = Policed(node.target, policy)
