"""Fetching rows, and giving back what was made of them, held against plain indexing of the whole sequence."""

from __future__ import annotations

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ops.fetch_rows import Wanted, apart, held, homes_and_wants, moved, or_past_end, taken, window_rows
from tests.harness.threads import run_on_threads

ops = torch.ops.ringopt

N = 13
WANTED = {
    "one row": taken((5, 1, 1)),
    "rows apart": taken((12, -3, 4)),
    "slice": moved((2, 1, 9)),
    "shift with zeros": moved((-2, 1, N + 3)),
    "every third": moved((1, 3, 4)),
    "roll": moved((10, 1, 3), (0, 1, 10)),
    "flip": moved((N - 1, -1, N)),
    "repeated ends": moved((0, 0, 3), (0, 1, N), (N - 1, 0, 2)),
    "between zeros": apart(2 * N + 3, 2, 3),
    "apart, from before the first": apart(N, 3, -4),
    "windows of three": window_rows(N, 1, -1, 3),
    "causal windows": window_rows(N, 1, -3, 4),
    "strided windows": window_rows(6, 2, -1, 3),
    "two windows a row": window_rows(2 * N - 1, 1, -1, 2, 2),
    "edges of windows": Wanted("edges", window_rows(N, 1, -3, 4).pieces),
    "edges of windows ahead": Wanted("edges", window_rows(N, 1, 0, 3).pieces),
}


def from_whole(x, rows):
    """These rows of the whole sequence, zeros outside it."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[or_past_end(rows, len(x))]


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ("contiguous", "zigzag"))
@pytest.mark.parametrize("p", (2, 3, 4))
@pytest.mark.parametrize("name", WANTED)
def test_rows_and_their_gradient(name, p, layout):
    wanted, factors = WANTED[name], (0, 2, N, 3)
    x = torch.randn(N, 2, 3, dtype=torch.float64, requires_grad=True)  # rows first, then outer and inner
    homes, wants = homes_and_wants(wanted, layout, N, p)
    parts = [from_whole(x, rows) for rows in wants]
    weights = [torch.randn_like(part) for part in parts]
    if wanted.everywhere:  # every rank has the complete gradient
        weights = [weights[0]] * p
        parts = parts[:1]
    sum((part * weight).sum() for part, weight in zip(parts, weights, strict=False)).backward()

    def merged(rows):  # [rows, outer, inner] as one dim
        return rows.permute(1, 0, 2).reshape(-1)

    def body(mesh):
        mine, rows = homes[mesh.rank], wants[mesh.rank]
        here = merged(x.detach()[mine]).clone().requires_grad_()
        out = ops.fetch_rows(here, *factors, wanted.form, wanted.numbers, len(rows), layout, mesh.name)
        assert torch.equal(out, merged(from_whole(x.detach(), rows)))
        (out * merged(weights[mesh.rank])).sum().backward()
        torch.testing.assert_close(here.grad, merged(x.grad[mine]))

    run_on_threads(p, body)


@pytest.mark.parametrize("dtype", (torch.bool, torch.bfloat16, torch.complex64, torch.int64))
def test_any_dtype_travels_bit_by_bit(dtype):
    x = torch.tensor([0.0, -0.0, 1.0, float("nan"), 3.0, -0.0]).to(dtype)[:, None]

    def body(mesh):
        mine = x[held(layout_of("zigzag", 6, 2), mesh.rank)]
        return ops.fetch_rows(mine, 0, 1, 6, 1, "take", [0, 1, 6], 6, "zigzag", mesh.name)

    for found in run_on_threads(2, body):
        assert torch.equal(found.view(torch.uint8), x.view(torch.uint8))


def test_one_number_travels_whatever_its_stride():
    """One element is contiguous for torch, but of no stride 1 where it was cut out."""
    x = torch.arange(24.0).view(6, 4)[:, ::4]

    def body(mesh):
        mine = torch.zeros(3, 4)[:, ::4].copy_(x[held(layout_of("contiguous", 6, 2), mesh.rank)])
        return ops.fetch_rows(mine, 0, 1, 6, 1, "take", [2, 1, 2], 2, "contiguous", mesh.name)

    for found in run_on_threads(2, body):
        assert found.tolist() == x[2:4].tolist()


def test_every_row_has_a_place_in_a_window():
    """Windows of a convolution with padding: chunk by chunk, all rows that they see and no other."""
    spec = window_rows(12, 2, -1, 3)
    assert [spec.ranges("zigzag", 2, rank) for rank in (0, 1)] == [
        [range(-1, 6), range(17, 24)],
        [range(5, 12), range(11, 18)],
    ]


@pytest.mark.parametrize("op, local", [(ops.fetch_rows.default, 9), (ops.return_rows.default, 8)])
def test_what_torch_asks_of_an_operator(op, local):
    def body(mesh):
        x = torch.randn(2, 8 if local == 9 else 9, 3, requires_grad=local == 9)
        return torch.library.opcheck(op, (x, 1, 1, 8, 1, "move", [-1, 1, 9], local, "zigzag", mesh.name))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}


def test_rows_that_are_looked_up():
    whole = torch.randn(2, N, 3, dtype=torch.float64, requires_grad=True)
    rows, weight = torch.tensor([12, 0, -1, 5, 0]), torch.randn(2, 5, 3, dtype=torch.float64)
    (whole[:, rows] * weight).sum().backward()

    def body(mesh):
        mine = held(layout_of("zigzag", N, 3), mesh.rank)
        x = whole.detach()[:, mine].clone().requires_grad_()
        found = ops.look_up_rows(x, rows, 1, N, "zigzag", mesh.name)
        assert torch.equal(found, whole[:, rows])
        (found * weight).sum().backward()
        torch.testing.assert_close(x.grad, whole.grad[:, mine])
        with pytest.raises(IndexError, match="row 13 was asked for, of a sequence of 13 rows"):
            ops.look_up_rows(x.detach(), torch.tensor([0, 13]), 1, N, "zigzag", mesh.name)

    run_on_threads(3, body)


def test_what_torch_asks_of_a_look_up():
    def body(mesh):
        args = (torch.tensor([1, 6]), 1, 8, "zigzag", mesh.name)
        return torch.library.opcheck(ops.look_up_rows.default, (torch.randn(2, 8, 3, requires_grad=True), *args))

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
