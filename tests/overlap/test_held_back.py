"""What the report says of collectives that the bound on bytes in flight holds back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx

from ringopt.overlap import held_back as module
from ringopt.overlap.async_collectives import Budget
from ringopt.overlap.held_back import held_back, too_large

ours = torch.ops.ringopt


def graph_of(call: Any, *args: Any) -> fx.Graph:
    """A call on 3 x 4 float32 numbers that want a gradient, and a gather of what it gives."""
    graph, value = fx.Graph(), torch.ones(3, 4, requires_grad=True)
    x = graph.placeholder("x")
    made = graph.call_function(call, (x, *args))
    whole = graph.call_function(ours.gather.default, (made, 0, 1, 3, 4, "contiguous", "pretend:0/2"))
    graph.output((whole,))
    for node in (x, made, whole):
        node.meta["val"] = value
    return graph


@pytest.mark.parametrize(
    ("call", "what"),
    [
        ((ours.scatter.default, 0, 1, 3, 4, 2, "contiguous", "pretend:0/2"), "gather"),
        ((ours.copy_to_group.default, "pretend:0/2"), "sum"),
    ],
)
def test_gradients_that_are_gathered_or_summed_count_where_they_alone_are_more_than_the_bound(
    call: tuple[Any, ...], what: str
) -> None:
    graph = graph_of(*call)
    assert too_large(graph, 47) == [f"{what} of the gradient of x (48 B)"]
    assert too_large(graph, 48) == []


@pytest.mark.parametrize(("many", "rest"), [(3, "c"), (5, "c and 2 more")])
def test_three_are_named_and_others_are_counted(monkeypatch: pytest.MonkeyPatch, many: int, rest: str) -> None:
    monkeypatch.setattr(module, "too_large", lambda graph, bound: list("abcde"[:many]))
    graph = fx.Graph()
    graph.output(())
    (remark,) = held_back(graph, Budget(2, 48), [], 2)
    assert remark.startswith(f"held back in the backward: a, b, {rest}, for at most ")
