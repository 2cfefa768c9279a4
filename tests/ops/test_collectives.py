"""Conversions: forward, conjugate backward, and what torch.library asks of an operator."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ops import operators as ops
from tests.harness.threads import run_on_threads


def rows_of(layout, n, p, rank):
    return [row for piece in layout_of(layout, n, p).ranges(rank) for row in piece]


@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("n, p", [(8, 2), (11, 2), (13, 3), (9, 4)])
@pytest.mark.parametrize("outer, inner", [(1, 1), (2, 3)])
def test_scatter_and_gather_are_each_others_backward(layout, n, p, outer, inner):
    whole = torch.randn(3, outer * n * inner, 2, dtype=torch.float64)
    weight = torch.randn_like(whole)

    def body(mesh):
        rows = rows_of(layout, n, p, mesh.rank)
        factors = (1, outer, n, inner)
        x = whole.clone().requires_grad_()
        mine = ops.scatter(x, *factors, len(rows), layout, mesh.name)
        expected = whole.view(3, outer, n, inner, 2)[:, :, rows].reshape(3, -1, 2)
        assert torch.equal(mine, expected) and mine.is_contiguous()
        back = ops.gather(mine, *factors, layout, mesh.name)
        assert torch.equal(back, whole)
        (back * weight).sum().backward()
        return x.grad

    for grad in run_on_threads(p, body):
        assert torch.equal(grad, weight)  # the whole gradient, on every rank


def test_copy_and_reduce_are_each_others_backward():
    def body(mesh):
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        copy = ops.copy_to_group(x, mesh.name)
        assert copy.data_ptr() == x.data_ptr()  # a view: parameters are not copied
        total = ops.reduce_from_group(copy * (mesh.rank + 1), mesh.name)
        total.sum().backward()
        return total.detach(), x.grad

    for total, grad in run_on_threads(3, body):
        assert total.tolist() == [6.0, 6.0] and grad.tolist() == [6.0, 6.0]


def test_gather_of_booleans():
    mask = torch.arange(7) % 3 == 0

    def body(mesh):
        rows = rows_of("zigzag", 7, 3, mesh.rank)
        return ops.gather(mask[rows], 0, 1, 7, 1, "zigzag", mesh.name)

    assert all(torch.equal(found, mask) for found in run_on_threads(3, body))


@pytest.mark.parametrize(
    "op, args",
    [
        (ops.scatter.default, (1, 1, 8, 1, 8, "zigzag")),
        (ops.gather.default, (1, 1, 8, 1, "contiguous")),
        (ops.reduce_from_group.default, ()),
    ],
)
def test_what_torch_asks_of_an_operator(op, args):
    def body(mesh):
        return torch.library.opcheck(op, (torch.randn(2, 8, 3, requires_grad=True), *args, mesh.name))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
