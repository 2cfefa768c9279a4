"""Masks as programs spell them, on pretended ranks: the sharded program is the program, gradients included."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness.translation import captured, difference, validate, values_and_gradients

B, N, D, H = 2, 13, 8, 2
LOWEST = torch.finfo(torch.float64).min


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask, self.qkv = mask, nn.Linear(D, 3 * D)
        self.table = nn.Embedding(2 * N, H)

    def forward(self, x, padding, documents):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, H, D // H).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rows, keys = torch.arange(n)[:, None], torch.arange(n)[None, :]
        mask = self.mask(self, rows, keys, padding[:, None, None, :], documents)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, n, D)


def alibi(m, rows, keys, padding, documents):
    slopes = torch.tensor([0.5, 0.25], dtype=torch.float64)[:, None, None]
    return torch.where(keys <= rows, slopes * (keys - rows), -torch.inf)[None]


def learned(m, rows, keys, padding, documents):
    return m.table(keys - rows + N).permute(2, 0, 1)[None]


def learned_and_causal(m, rows, keys, padding, documents):
    return learned(m, rows, keys, padding, documents).masked_fill(keys > rows, LOWEST)


#: name -> (mask, what the report calls it)
MASKS = {
    "causal": (lambda m, rows, keys, p, d: keys <= rows, "causal"),
    "float triangle": (
        lambda m, rows, keys, p, d: torch.full((N, N), -torch.inf, dtype=torch.float64).triu(1),
        "causal",
    ),
    "window": (lambda m, rows, keys, p, d: (keys <= rows) & (keys > rows - 4), "window(4)"),
    "window both ways": (lambda m, rows, keys, p, d: (keys - rows).abs() < 3, "window(3,both)"),
    "padding": (lambda m, rows, keys, p, d: p.expand(B, 1, N, N), "padding"),
    "causal and padding": (lambda m, rows, keys, p, d: (keys <= rows) & p, "causal & padding"),
    "documents": (
        lambda m, rows, keys, p, d: (d[:, None, :, None] == d[:, None, None, :]) & (keys <= rows),
        "causal & ",
    ),
    "prefix": (lambda m, rows, keys, p, d: (keys <= rows) | (keys < 4), ""),
    "alibi": (alibi, "causal & bias"),
    "learned": (learned, "bias(learned"),
    "learned and causal": (learned_and_causal, "causal & bias(learned"),
}


def inputs():
    torch.manual_seed(0)
    x = torch.randn(B, N, D, dtype=torch.float64, requires_grad=True)
    padding = torch.ones(B, N, dtype=torch.bool)
    padding[0, -3:] = False
    return x, padding, (torch.arange(N) // 4)[None].expand(B, N)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    (mask, pattern), p = MASKS[name], 2 + list(MASKS).index(name) % 2
    verdict = validate(p, Masked(mask).double(), *inputs(), layout=("contiguous", "zigzag")[p % 2])
    assert not verdict.wrong
    (site,) = verdict.report.sites
    assert site.refusal is None and site.pattern.startswith(pattern), site.pattern


def test_a_row_that_sees_nothing_is_zero():
    """-inf everywhere: left padding under a causal mask."""

    def left_padded(m, rows, keys, padding, documents):
        return (keys <= rows) & padding.flip(-1)

    assert not validate(3, Masked(left_padded).double(), *inputs()).wrong


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
def test_a_row_hidden_by_a_large_number_weighs_all_keys_alike(p):
    """-1.8e308 in place of -inf: the scores vanish in the rounding, in every tile alike.

    Against SDPA written out: the gradients of PyTorch's flash kernel for such rows are too large by the number of keys.
    """

    def left_padded(m, rows, keys, padding, documents):
        return torch.zeros(B, 1, N, N, dtype=torch.float64).masked_fill(~((keys <= rows) & padding.flip(-1)), LOWEST)

    module, given = Masked(left_padded).double(), inputs()
    gm, flat = captured(module, *given)
    with sdpa_kernel([SDPBackend.MATH]):
        expected = values_and_gradients(gm, flat)
    verdict = validate(p, module, *given)
    assert [difference(expected, found, 1e-8) for found in verdict.found] == [""] * p
