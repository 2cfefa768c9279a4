"""Regions of activation checkpointing: what is kept, what is computed again, and whose policy is asked."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from ringopt.distributed.lookup import mesh_of
from ringopt.ir.checkpoint_regions import Region, tags
from ringopt.ir.notes import POLICY
from ringopt.options import Options
from ringopt.passes.recompute import Recompute
from ringopt.pipeline import Context
from ringopt.torch_compat.tensors import TorchDispatchMode


def test_only_the_policy_of_its_own_region_is_asked_about_an_operator() -> None:
    graph, policy = fx.Graph(), TorchDispatchMode()
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(3)
    for region in range(2):
        x = graph.call_function(torch.ops.aten.sin.default, (x,))
        x.meta |= {"val": torch.zeros(3), **tags(region)}
    graph.output(x)
    context = Context(Options(), mesh_of("pretend:0/2"))
    context.regions.made.update({0: Region(0, policy), 1: Region(1)})
    Recompute().run(fx.GraphModule({}, graph), context)
    nodes = list(graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))
    assert [node.meta.get(POLICY) for node in nodes] == [policy, None]
    assert [node.meta["recompute"] for node in nodes] == [CheckpointPolicy.PREFER_RECOMPUTE] * 2
