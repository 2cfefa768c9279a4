"""Parameters that no branch used have no gradient, as in eager, and are not decayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from ringopt.drivers.teach_dynamo import teach_dynamo
from ringopt.frontend.data_sizes.gradients import gradients_where_taken, take_conditions
from ringopt.frontend.data_sizes.traced_again import trace_with_sizes, traces_sizes


class Chosen(nn.Module):
    """An expert for positive rows, one for others, and a weight that both use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.shared = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2 + 0 * self.experts[0].bias
        for number, expert in enumerate(self.experts):
            row = torch.where((x[:, 0] > 0) == bool(number))[0]
            if len(row) > 0:
                y.index_add_(0, row, expert(x[row]) * self.shared)
        return y


def gated(gm: torch.fx.GraphModule, _inputs: Any) -> Any:
    return gradients_where_taken(gm, take_conditions(gm, trace_with_sizes(gm, 2)))


def gradients(run: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    run(x).sum().backward()
    return [p.grad.clone() if p.grad is not None else None for p in model.parameters()]


def test_they_are_none_where_no_branch_was_taken_that_uses_them() -> None:
    teach_dynamo()
    torch._dynamo.reset()
    model, alike = Chosen(), Chosen()
    run = torch.compile(model, backend=traces_sizes(lambda: True)(gated))
    some = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    for x in (some, -some, some):  # the second finds gradients of the first
        for each, expected in zip(gradients(run, model, x), gradients(alike, alike, x), strict=True):
            assert (each is None) == (expected is None)
            assert each is None or torch.equal(each, expected)


def test_an_optimizer_leaves_them_alone() -> None:
    teach_dynamo()
    torch._dynamo.reset()
    model, alike = Chosen(), Chosen()
    run = torch.compile(model, backend=traces_sizes(lambda: True)(gated))
    for program, parameters in ((run, model), (alike, alike)):
        optimizer = torch.optim.AdamW(parameters.parameters(), lr=0.1, weight_decay=0.5)
        program(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(model.experts[0].weight, Chosen().experts[0].weight)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), alike.parameters(), strict=True))


def test_nothing_is_read_where_nothing_is_to_be_none() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    assert take_conditions(graph, []) == {} and gradients_where_taken(graph, {}) is graph


def capped(x: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
    if hot.any():
        x[hot] = 1.0
    return hot * 1.0


def filled(x: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
    y = x.view(2, 2)
    if hot.any():
        y = y.masked_fill(hot, 1.0)
    return y * 2


def filled_and_divided_by(x: torch.Tensor, hot: torch.Tensor) -> torch.Tensor:
    y, z = x.view(2, 2), x * 3
    if hot.any():
        y = y.masked_fill(hot, 1.0)
        z = z / y.sum()
    return y * 2 + z


@pytest.mark.parametrize("program", [capped, filled, filled_and_divided_by])
def test_what_is_the_callers_own_or_goes_on_has_a_gradient_either_way(program: Any) -> None:
    teach_dynamo()
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(program, backend=traces_sizes(lambda: True)(gated)), program):
        for cut in (3.0, 9.0):
            leaf = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
            x = leaf * 2
            y = run(x, leaf.detach() > cut)
            found.append(torch.autograd.grad(x.square().sum() + y.sum(), leaf)[0])
    assert len(found) == 4
    for each, expected in zip(found[:2], found[2:], strict=True):
        assert torch.equal(each, expected)
