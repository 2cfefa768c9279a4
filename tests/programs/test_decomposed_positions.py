"""Positions of a picture's rows and of its columns, each a product with the queries, added up for each pair.

    bias[q, k] = (q @ rows)[q, k // width] + (q @ columns)[q, k % width]

(Li et al. 2022, MViTv2, section 4.1; the towers of ViTDet and of Segment Anything.) Of both tables, which are computed
over a picture's rows and columns, a rank has the places of its own queries.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, HEADS = 16, 2


class Layer(nn.Module):
    """Of pictures [B, H, W, C]; the bias is a mask of a fused attention, or added to scores."""

    def __init__(self, height, width, fused):
        super().__init__()
        self.fused, self.qkv, self.out = fused, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rows, self.columns = (nn.Parameter(torch.randn(2 * n - 1, WIDTH // HEADS)) for n in (height, width))

    def forward(self, x):
        batch, height, width, _ = x.shape
        heads = self.qkv(x).reshape(batch, height * width, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.reshape(3, batch * HEADS, height * width, -1).unbind(0)
        away = [torch.arange(n)[:, None] - torch.arange(n) + n - 1 for n in (height, width)]
        picture = q.reshape(batch * HEADS, height, width, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", picture, self.rows[away[0]])
        columns = torch.einsum("bhwc,wkc->bhwk", picture, self.columns[away[1]])
        bias = (rows[..., None] + columns[..., None, :]).reshape(batch * HEADS, height * width, height * width)
        if self.fused:
            q, k, v, bias = (t.unflatten(0, (batch, HEADS)) for t in (q, k, v, bias))
            y = F.scaled_dot_product_attention(q, k, v, bias).flatten(0, 1)
        else:
            y = (q @ k.mT / 3 + bias).softmax(-1) @ v
        y = y.unflatten(0, (batch, HEADS)).transpose(1, 2).reshape(batch, height, width, -1)
        return x + self.out(y)


class Tower(nn.Module):
    def __init__(self, height, width, fused):
        super().__init__()
        torch.manual_seed(0)
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.layers = nn.Sequential(*(Layer(height, width, fused) for _ in range(2)))
        self.double()

    def forward(self, image):
        return self.layers(self.patches(image).permute(0, 2, 3, 1))


def image(height, width, batch=2):
    made = torch.randn(batch, 3, 2 * height, 2 * width, generator=torch.Generator().manual_seed(1))
    return made.double().requires_grad_()


@pytest.mark.parametrize("fused, size, p", [(True, (14, 14), 2), (False, (13, 15), 3)])
def test_a_rank_has_the_places_of_its_own_queries(fused, size, p):
    verdict = validate(p, Tower(*size, fused), image(*size))
    assert verdict.wrong == "" and [site.refusal for site in verdict.report.sites] == [None, None]
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_batches_that_are_open():
    run_over(Tower(12, 11, True), [(image(12, 11, batch),) for batch in (2, 5, 3)], 2, dynamic=None)
