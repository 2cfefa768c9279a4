"""Messages that do not depend on each other keep their order through Inductor."""

from __future__ import annotations

import torch
from torch._inductor.fx_passes.control_dependencies import control_deps
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.ops import operators as ops
from ringopt.ops.traits import talks
from ringopt.overlap.async_collectives import Budget
from ringopt.overlap.collective_order import Lockstep, Split
from ringopt.overlap.start_early import InOrder, inductor_settings
from ringopt.torch_compat import inductor
from ringopt.torch_compat.inductor_passes import CustomPartitionerFn


def test_each_operator_waits_for_the_one_before():
    def program(x):
        return ops.reduce_from_group(x, "pretend:0/2") * ops.reduce_from_group(x + 1, "pretend:0/2"), ops.scatter(
            x, 0, 1, 4, 1, 2, "contiguous", "pretend:0/2"
        )

    gm = make_fx(program, tracing_mode="fake")(torch.randn(4))
    settings = inductor_settings(gm, Budget())
    assert isinstance(settings["post_grad_custom_post_pass"], InOrder)
    assert isinstance(settings["custom_partitioner_fn"], Split) and settings["reorder_for_peak_memory"] is False
    first = next(node for node in gm.graph.nodes if talks(node))
    Lockstep()(gm.graph)
    gm.graph.lint()
    chained = [node for node in gm.graph.nodes if node.target is control_deps]
    assert [node.args[0] for node in chained] == [(first,), (chained[0],)]


def test_a_graph_without_messages_is_left_to_inductor():
    assert inductor_settings(make_fx(lambda x: x.exp())(torch.randn(4)), Budget()) == {}


class Theirs(CustomPartitionerFn):
    def __call__(self, gm, joint_inputs, **how):
        return "forward", "backward"

    def uuid(self):
        return "theirs"


def test_a_partitioner_that_the_user_has_set_still_splits():
    gm = make_fx(lambda x: ops.reduce_from_group(x, "pretend:0/2"), tracing_mode="fake")(torch.randn(4))
    with inductor.patched(custom_partitioner_fn=Theirs()):
        split = inductor_settings(gm, Budget())["custom_partitioner_fn"]
    assert isinstance(split, Split) and split(gm, [], num_fwd_outputs=1) == ("forward", "backward")
    assert "theirs" in split.uuid()


def test_a_pass_that_the_user_has_set_still_runs_and_first():
    """The order of messages is the last word on a graph: a pass behind it could undo it."""

    def program(x):
        return ops.reduce_from_group(x.exp(), "pretend:0/2"), ops.reduce_from_group(x + 1, "pretend:0/2")

    gm = make_fx(program, tracing_mode="fake")(torch.randn(4))
    graphs, seen = [], []

    def theirs(graph):
        graphs.append(graph)
        seen.append([node.target for node in graph.nodes])

    with inductor.patched(post_grad_custom_post_pass=theirs):
        chosen = inductor_settings(gm, Budget())
        inductor.compile_fx(gm, [torch.randn(4)], chosen)
    assert len(seen) == 1 and torch.ops.aten.exp.default in seen[0] and control_deps not in seen[0]
    assert any(node.target is control_deps for node in graphs[0].nodes)
