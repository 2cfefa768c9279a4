"""Operators of ATen with a private name: which one stands in graphs, and what it computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.operators import (
    ASSERT_SCALAR,
    ASSERT_TENSOR,
    GIVES_MEMORY,
    KERNEL_ORDERED_NORMS,
    SAFE_SOFTMAX,
    TO_COPY,
    UNSAFE_VIEW,
)
from ringopt.torch_compat.schema import schema_of


def test_a_cast_is_traced_as_a_copy() -> None:
    graph = make_fx(lambda x: x.to(torch.float64), tracing_mode="real")(torch.ones(2)).graph
    (cast,) = graph.find_nodes(op="call_function", target=TO_COPY)
    assert len(cast.args) == 1 and cast.kwargs == {"dtype": torch.float64}


def test_a_product_of_batches_is_traced_with_unsafe_views() -> None:
    graph = make_fx(torch.matmul, tracing_mode="real")(torch.ones(2, 3, 4), torch.ones(4, 5)).graph
    (view,) = graph.find_nodes(op="call_function", target=UNSAFE_VIEW)
    assert list(view.args[1]) == [2, 3, 5]


def test_an_assertion_of_a_graph_raises_what_it_says() -> None:
    ASSERT_SCALAR(True, "no")
    with pytest.raises(RuntimeError, match="rows are missing"):
        ASSERT_SCALAR(False, "rows are missing")


def test_an_assertion_of_a_tensor_raises_what_it_says() -> None:
    compiled = torch.compile(lambda x: torch._assert_async(x.any(), "all are zero"), backend=kept)
    compiled(torch.ones(2))
    assert graphs[-1].find_nodes(op="call_function", target=ASSERT_TENSOR[0])
    for target, words in zip(ASSERT_TENSOR, (["no"], [], ["no"]), strict=True):
        with pytest.raises(RuntimeError, match=(words or ["Expected"])[0]):
            target(torch.tensor(False), *words)


graphs: list[torch.fx.Graph] = []


def kept(gm: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
    graphs.append(gm.graph)
    return gm


def test_other_data_are_other_memory() -> None:
    layer = torch.nn.Linear(2, 2)

    def halved(x: Tensor) -> Tensor:
        layer.weight.data = layer.weight.data * 0.5
        return x

    torch.compile(halved, backend=kept)(torch.ones(2))
    assert sum(node.target in GIVES_MEMORY.values() for node in graphs[-1].nodes) == 1


def test_a_softmax_of_nothing_is_zero() -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    assert torch.equal(SAFE_SOFTMAX(scores, -1), torch.tensor([[0.5, 0.5], [0.0, 0.0]]))


def test_norms_give_their_result_first() -> None:
    assert len(set(KERNEL_ORDERED_NORMS)) == 6
    for norm in KERNEL_ORDERED_NORMS:
        assert schema_of(norm).arguments[0].name == "input"
        assert str(schema_of(norm).returns[0].type) == "Tensor"


def test_a_norm_in_training_is_one_of_them() -> None:
    def norm(x: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, None, None, training=True)

    graph = make_fx(norm, tracing_mode="real")(torch.ones(2, 3, 4)).graph
    assert any(node.target in KERNEL_ORDERED_NORMS for node in graph.nodes)
