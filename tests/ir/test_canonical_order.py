"""An order of nodes and outputs that follows from what is computed."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.fx as fx

from ringopt.ir.canonical_order import canonical_order, content
from ringopt.torch_compat.fake_tensors import FakeTensorMode

aten = torch.ops.aten


def outputs_in_order(first: str) -> list[str]:
    """relu(x) twice, and the sine of one of the two; the program has them begin with `first`."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    x = graph.placeholder("x")
    for name in (first, *({"alone", "read"} - {first})):
        made[name] = graph.create_node("call_function", aten.relu.default, (x,), name=name)
    sine = graph.create_node("call_function", aten.sin.default, (made["read"],), name="sine")
    outputs = [*made.values(), sine]
    graph.output(tuple(outputs))
    return [outputs[place].name for place in canonical_order(graph)[1]]


def test_outputs_that_are_computed_alike_differ_by_who_reads_them() -> None:
    assert outputs_in_order("alone") == outputs_in_order("read")


@pytest.mark.parametrize("kind", ["fake", "meta", "sparse"])
def test_of_a_constant_without_numbers_at_hand_the_text_has_dtype_and_shape(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else nullcontext():
        value = torch.ones(2, 3, device="meta" if kind == "meta" else "cpu")
    assert content(value.to_sparse() if kind == "sparse" else value) == "torch.float32 [2, 3]"


def test_of_another_constant_the_text_has_its_numbers_however_they_lie() -> None:
    one = torch.arange(6.0).view(2, 3)
    assert content(one).startswith("torch.float32 [2, 3] ")
    assert content(one) == content(one.T.contiguous().T) != content(one + 1)
