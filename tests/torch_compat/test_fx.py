"""torch.fx behind its documented surface."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import nn

from ringopt.torch_compat.fx import fresh_names, get_decompositions, has_buffer, lazily_written, make_fx, rename_node


def test_a_call_is_traced_above_or_below_autograd() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, x)

    x = torch.ones(2, 2)
    above = make_fx(attend, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(x)
    below = make_fx(attend, tracing_mode="real", _allow_non_fake_inputs=True)(x)
    assert above.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert not below.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert above.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (2, 2)


def test_what_is_detached_is_written_so() -> None:
    def sines(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x: x.detach().sin() * x[:])(x) * x.data * torch.ops.aten.alias(x)

    traced = make_fx(sines, tracing_mode="real")(torch.ones(2, 3))
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default)) == 2
    assert len(traced.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default)) == 1


def test_code_is_written_when_it_is_read() -> None:
    with lazily_written():
        gm = make_fx(torch.sin, tracing_mode="real")(torch.ones(2))
    gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)[0].target = torch.ops.aten.cos.default
    gm.recompile()
    assert "cos" in gm.code and torch.equal(gm(torch.zeros(2)), torch.ones(2))


def test_a_node_gets_another_name() -> None:
    graph = fx.Graph()
    first, second = graph.placeholder("a"), graph.placeholder("b")
    rename_node(first, "c")
    rename_node(second, "c")
    assert (first.name, second.name) == ("c", "c_1")


def test_names_are_given_anew() -> None:
    graph = fx.Graph()
    node = graph.placeholder("a")
    names = fresh_names(graph)
    assert names.create_name("a", node) == "a" and graph.placeholder("a").name == "a_1"


def test_buffers_are_told_from_parameters() -> None:
    root = nn.Module()
    root.register_buffer("kept", torch.ones(1))
    root.weight = nn.Parameter(torch.ones(1))
    graph = fx.Graph()
    graph.output((graph.get_attr("kept"), graph.get_attr("weight")))
    gm = fx.GraphModule(root, graph)
    assert has_buffer(gm, "kept") and not has_buffer(gm, "weight")


def test_an_operator_is_taken_apart() -> None:
    table = get_decompositions([torch.ops.aten.native_layer_norm])
    call = lambda x: torch.ops.aten.native_layer_norm(x, [4], None, None, 1e-5)[0]  # noqa: E731
    names = [str(node.target) for node in make_fx(call, decomposition_table=table)(torch.ones(2, 4)).graph.nodes]
    assert "aten.rsqrt.default" in names and not [name for name in names if "layer_norm" in name]
