"""The extreme element over all ranks, and who gets its gradient."""

from __future__ import annotations

import pytest
import torch

from ringopt.ops import operators as ops
from tests.harness.threads import run_on_threads


@pytest.mark.parametrize("largest", (True, False))
@pytest.mark.parametrize("dims", ([0], [0, 1]))
def test_ties_on_several_ranks_share_the_gradient_evenly(dims, largest):
    whole = torch.randint(0, 3, (9, 4)).double().requires_grad_()
    expected = (torch.amax if largest else torch.amin)(whole, dims, keepdim=True)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    cuts = [(0, 2), (2, 5), (5, 9)]

    def body(mesh):
        mine = slice(*cuts[mesh.rank])
        x = whole.detach()[mine].clone().requires_grad_()
        found = ops.extreme(x, dims, largest, mesh.name)
        assert torch.equal(found, expected)
        (found * weight).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad[mine])

    run_on_threads(3, body)


def test_a_nan_on_one_rank_is_the_result_on_all():
    def body(mesh):
        return ops.extreme(torch.tensor([float("nan") if mesh.rank else 1.0]), [0], True, mesh.name)

    assert all(found.isnan() for found in run_on_threads(2, body))


def test_what_torch_asks_of_an_operator():
    def body(mesh):
        x = torch.randn(2, 5, 3, requires_grad=True)
        return torch.library.opcheck(ops.extreme.default, (x, [1], True, mesh.name))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
