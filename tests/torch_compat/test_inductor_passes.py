"""What passes over Inductor's graphs are made of."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx

from ringopt.torch_compat import inductor
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.inductor_passes import (
    FORCE_STRIDE_ORDER,
    CustomGraphPass,
    CustomPartitionerFn,
    OrderedSet,
    preserve_node_ordering,
    with_last,
)


def test_a_pass_is_called_with_a_graph_and_named_for_the_cache() -> None:
    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None: ...

        def uuid(self) -> str:
            return "1"

    assert Pass().uuid() == "1"
    with pytest.raises(TypeError, match="abstract"):
        CustomGraphPass()


def test_a_partitioner_is_given_by_such_a_class() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CustomPartitionerFn()


def test_a_set_keeps_the_order_in_which_its_elements_came() -> None:
    assert list(OrderedSet([3, 1, 2, 1])) == [3, 1, 2]


def test_nodes_are_tied_to_those_that_have_to_run_before() -> None:
    gm = make_fx(lambda x, y: (x.sin(), y.cos()), tracing_mode="real")(torch.ones(2), torch.ones(2))
    sin, cos = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default) + gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.cos.default
    )
    preserve_node_ordering(gm.graph, {cos: OrderedSet([sin])})
    gm.graph.lint()
    gm.recompile()
    assert [node for node in gm.graph.nodes if sin in node.all_input_nodes and node.op == "call_function"]


def test_an_order_of_strides_is_asked_for() -> None:
    x = torch.ones(2, 1, 3, 4)
    assert torch.equal(FORCE_STRIDE_ORDER(x, [4, 3, 2, 1]), x)
    assert "force_stride_order" in str(FORCE_STRIDE_ORDER)


class Named(CustomGraphPass):
    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    def __call__(self, graph: fx.Graph) -> None:
        self.ran.append(self.name)

    def uuid(self) -> str:
        return self.name


def test_a_pass_runs_behind_one_that_is_set() -> None:
    ran: list[str] = []
    ours = Named("ours", ran)
    assert with_last(None, ours) is ours
    for theirs, cached in ((Named("theirs", ran), True), (lambda graph: ran.append("theirs"), False)):
        ran.clear()
        with inductor.patched(post_grad_custom_post_pass=with_last(theirs, ours)), inductor.fresh_cache():
            gm = make_fx(lambda x: x.sin(), tracing_mode="real")(torch.ones(2))
            inductor.compile_fx(gm, [torch.ones(2)])
        assert ran == ["theirs", "ours"]
        both = with_last(theirs, ours)
        assert cached == all(getattr(one, "uuid", lambda: None)() for one in (both if type(both) is list else [both]))
