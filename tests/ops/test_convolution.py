"""Convolution whose chunks are found out when it runs: numbers and gradients of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.ops import operators as ops
from ringopt.ops.reshard import places
from tests.harness.threads import run_on_threads


@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous"), (1, "contiguous")])
@pytest.mark.parametrize("stride, padding, dilation, groups", [(1, 1, 1, 1), (1, 6, 3, 4), (3, 2, 1, 2)])
def test_numbers_and_gradients_are_those_of_the_whole(p, layout, stride, padding, dilation, groups):
    torch.manual_seed(0)
    n, width = 19, 2 * dilation + 1
    whole, weight, bias = (
        torch.randn(*sizes, dtype=torch.float64, requires_grad=True) for sizes in ((2, 4, n), (8, 4 // groups, 3), (8,))
    )
    expected = F.conv1d(whole, weight, bias, stride, padding, dilation, groups)
    rows = expected.shape[2]
    dout = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (whole, weight, bias), dout)

    def body(mesh):
        mine, made = (places((1, length, 1), layout, p, mesh.rank) for length in (n, rows))
        given = [x.detach().clone().requires_grad_() for x in (whole[..., mine], weight, bias)]
        how = ([rows, stride, -padding, width], [stride], [0], [dilation], groups, len(made), layout, mesh.name)
        out = ops.convolve_rows(*given, 2, n, *how)
        torch.testing.assert_close(out, expected[..., made])
        found = torch.autograd.grad(out, given, dout[..., made])
        torch.testing.assert_close(found[0], gradients[0][..., mine])
        return found[1:]

    parts = run_on_threads(p, body)
    for found, right in zip(zip(*parts, strict=True), gradients[1:], strict=True):
        torch.testing.assert_close(sum(found), right)


def test_of_images_the_other_dim_has_its_own_stride_padding_and_dilation():
    """Rows of an image are sharded and its columns are not; a graph is told the size that comes out."""
    torch.manual_seed(0)
    whole, weight = torch.randn(2, 3, 12, 10), torch.randn(4, 3, 3, 3)
    expected = F.conv2d(whole, weight, None, (1, 2), (1, 3), (1, 2))

    def body(mesh):
        mine = places((1, 12, 1), "contiguous", 2, mesh.rank)
        how = ([12, 1, -1, 3], [1, 2], [0, 3], [1, 2], 1, 6, "contiguous", mesh.name)
        given = whole[:, :, mine], weight
        out = ops.convolve_rows(*given, None, 2, 12, *how)
        torch.testing.assert_close(out, expected[:, :, mine])
        mode = FakeTensorMode()
        assert ops.convolve_rows(*map(mode.from_tensor, given), None, 2, 12, *how).shape == out.shape

    run_on_threads(2, body)


def test_what_torch_asks_of_an_operator():
    def body(mesh):
        given = [torch.randn(*sizes, requires_grad=True) for sizes in ((2, 4, 8), (4, 4, 3), (4,))]
        args = (*given, 2, 8, [8, 1, -1, 3], [1], [0], [1], 1, 8, "zigzag", mesh.name)
        return torch.library.opcheck(ops.convolve_rows.default, args)

    assert set(run_on_threads(1, body)[0].values()) == {"SUCCESS"}
