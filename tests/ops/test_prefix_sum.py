"""Running sums over chunks that lie on several ranks."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ops import operators as ops
from ringopt.ops.fetch_rows import held
from tests.harness.threads import run_on_threads


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("n, p", [(8, 2), (11, 3), (9, 4), (5, 3)])
@pytest.mark.parametrize("backwards", (False, True))
def test_a_running_sum_and_its_gradient(layout, n, p, backwards):
    whole = torch.randn(2, n, 3, dtype=torch.float64, requires_grad=True)
    expected = whole.flip(1).cumsum(1).flip(1) if backwards else whole.cumsum(1)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()

    def body(mesh):
        mine = held(layout_of(layout, n, p), mesh.rank)
        x = whole.detach()[:, mine].clone().requires_grad_()
        found = ops.running_sum(x, 1, n, backwards, layout, mesh.name)
        torch.testing.assert_close(found, expected[:, mine])
        (found * weight[:, mine]).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad[:, mine])

    run_on_threads(p, body)


def test_what_torch_asks_of_an_operator():
    def body(mesh):
        x = torch.randn(2, 8, 3, requires_grad=True)
        return torch.library.opcheck(ops.running_sum.default, (x, 1, 8, False, "zigzag", mesh.name))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
