"""Patches of an image are rows from their convolution on: nothing of a vision transformer is computed whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.dims.op_families import CONVOLUTIONS
from ringopt.ir.nodes import op_name
from tests.harness.models import build
from tests.harness.translation import validate

WIDTH, HEADS = 16, 2


class Vision(nn.Module):
    """Patches in 1 to 3 dims, a class token before them, attention, the class token's logits."""

    def __init__(self, dims, bias=True, **how):
        super().__init__()
        torch.manual_seed(0)
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.patches = conv(3, WIDTH, **{"kernel_size": 2, "stride": 2, "bias": bias, **how})
        self.token, self.qkv = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, image):
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x[:, 0]), x.square().mean()


def sharded(size, p=2, **how):
    image = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    verdict = validate(p, Vision(len(size), **how).double(), image.requires_grad_())
    assert not verdict.wrong and not verdict.report.gathers and verdict.report.sharded_fraction > 0.99
    return {op_name(node) for node in verdict.graph.graph.nodes}


@pytest.mark.sample(2)
@pytest.mark.parametrize("size, p", [((22,), 2), ((10, 7), 3), ((6, 8), 2), ((4, 5, 6), 4)])
def test_patches_are_rows(size, p):
    """Each is a row that a linear layer reads. What is left over at the sides of 7 and 5 is no part of a patch."""
    assert set(CONVOLUTIONS).isdisjoint(sharded(size, p))


def test_kernels_that_are_no_squares():
    assert set(CONVOLUTIONS).isdisjoint(sharded((6, 12), kernel_size=(2, 3), stride=(2, 3), bias=False))


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", [{"kernel_size": 3}, {"padding": 1}])
def test_other_convolutions_are_computed_by_rows_of_the_picture(how):
    assert "conv2d" in sharded((8, 8), **how)


class Bits(nn.Module):
    """A query of the bits of what a convolution of patches gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv1d(3, WIDTH, 2, 2)

    def forward(self, image):
        x = self.patches(image).unflatten(1, (HEADS, -1)).transpose(2, 3)
        bits = self.patches(image).view(torch.int64) % 7
        q = bits.unflatten(1, (HEADS, -1)).transpose(2, 3).to(x.dtype)
        return F.scaled_dot_product_attention(q, x, x)


def test_bits_of_patches_are_no_patches():
    image = torch.randn(2, 3, 22, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    verdict = validate(2, Bits().double(), image)
    assert not verdict.wrong and not verdict.report.refusal


def test_a_vision_transformer_of_transformers():
    verdict = validate(3, *build("vit", 0, torch.float64))
    assert not verdict.wrong and verdict.report.sharded_fraction > 0.99


class Detector(nn.Module):
    """A picture's features by convolutions, projected pixel by pixel, as tokens (DETR: Carion et al. 2020)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.attend = Vision(2, kernel_size=1, stride=1)
        self.attend.patches = nn.Conv2d(8, WIDTH, 1)

    def forward(self, image):
        return self.attend(self.tower(image))


@pytest.mark.parametrize("size, p", [((16, 6), 2), ((13, 5), 3)])
def test_what_layers_made_is_cut_above_them(size, p):
    """A projection pixel by pixel is a convolution of patches too, of one pixel each; its picture is no input."""
    image = torch.randn(2, 3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    verdict = validate(p, Detector().double(), image.requires_grad_())
    assert not verdict.wrong and verdict.report.sharded_fraction > 0.99
