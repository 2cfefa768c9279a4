"""Graphs without attention and recurrences: the sequence is what prefix sums and Fourier transforms run along, and what
products of activations sum over."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, ROWS = 8, 13


class Layers(nn.Module):
    """Two layers of `mix(q, k, v)`, each [B, S, D]."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.qkv, self.out = mix, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x):
        for _ in range(2):
            x = x + self.out(self.mix(*self.qkv(x).chunk(3, -1)))
        return x


def given(rows=ROWS):
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, requires_grad=True)


def linear_attention(q, k, v):
    """Katharopoulos et al. 2020, as a prefix sum of outer products."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    states, sums = (k[..., :, None] * v[..., None, :]).cumsum(1), k.cumsum(1)
    return (q[..., None, :] @ states).squeeze(-2) / (q * sums).sum(-1, keepdim=True)


def min_gru(q, k, v):
    """Feng et al. 2024, in logarithms: a prefix sum, and one of exponentials."""
    kept, new = -F.softplus(q), -F.softplus(-q) + F.softplus(k).log()
    decay = kept.cumsum(1)
    return (decay + (new - decay).logcumsumexp(1)).exp() * v


def long_convolution(q, k, v):
    """Hyena (Poli et al. 2023), S4: a filter as long as the sequence, by transforms of twice its length."""
    n = q.shape[1]
    decay = torch.exp(-torch.arange(n) / 3)[:, None].to(v)
    made = torch.fft.rfft(k * v, 2 * n, dim=1) * torch.fft.rfft(decay, 2 * n, dim=0)
    return q * torch.fft.irfft(made, 2 * n, dim=1)[:, :n]


def convolved(q, k, v):
    short = F.conv1d(F.pad(k.mT, (2, 0)), torch.ones(WIDTH, 1, 3).to(k) / 3, groups=WIDTH).mT
    return torch.tanh((short * v).cumsum(1)) * q


def state(q, k, v):
    """Linear attention without a mask (Katharopoulos et al. 2020; Sana, EfficientViT): one state of all tokens."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.mT @ v) / (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)


def spectrum(q, k, v):
    """FNet (Lee-Thorp et al. 2021), AFNO (Guibas et al. 2021): tokens and channels in one transform."""
    made = torch.fft.rfft2(q * v, dim=(1, 2), norm="ortho")
    return torch.fft.fft2(k).real / 9 + torch.fft.irfft2(made * made.abs(), s=q.shape[1:], dim=(1, 2), norm="ortho")


MIXED = {
    "a state of all tokens": state,
    "channels that attend to channels": lambda q, k, v: ((q.mT @ k).softmax(-1) @ v.mT).mT,
    "weights over the tokens": lambda q, k, v: torch.einsum("bsf,bfd->bsd", q.softmax(-1), k.softmax(1).mT @ v),
    "linear attention": linear_attention,
    "minGRU": min_gru,
    "a long convolution": long_convolution,
    "transforms of both dims": spectrum,
    "behind a short convolution": convolved,
    "products of decays": lambda q, k, v: torch.sigmoid(k).cumprod(1) * v + q,
}


@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(MIXED)])
def test_tokens_stay_on_shards(name, p):
    verdict = validate(p, Layers(MIXED[name]), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
    assert any("tokens are sharded along the dim of" in note for note in verdict.report.notes)


@pytest.mark.parametrize("mix", [min_gru, state, spectrum])
def test_lengths_that_are_open(mix):
    calls = [(given(rows),) for rows in (20, 13, 4)]
    reports = run_over(Layers(mix), calls, 3, dynamic=True).reports
    # (Beside batched products, fewer than two tokens a rank are compiled for themselves.)
    assert [report.sharded_fraction for report in reports] == [1.0] * (2 if mix is state else 1)


def positions(q, k, v):
    """Of integers, as positions are counted: no tokens are mixed."""
    return q * (k.detach() > 0).long().cumsum(1) + v


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v.cumsum(1), is_causal=True)


LEFT = {
    "over features": lambda q, k, v: q * k.softmax(-1).cumsum(-1) + v,
    "positions": positions,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_mixes_no_tokens(name):
    verdict = validate(2, Layers(LEFT[name]), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 0 and verdict.report.notes == ()


def test_fewer_tokens_than_ranks():
    verdict = validate(3, Layers(min_gru), given(2))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 0


def test_an_attention_says_itself_what_the_sequence_is():
    report = validate(2, Layers(attended), given()).report
    assert report.sharded_fraction > 0.9 and not any("along the dim of" in note for note in report.notes)


def test_the_report_names_the_line():
    (note,) = validate(2, Layers(min_gru), given()).report.notes
    assert "cumsum (test_mixing.py:" in note and "logcumsumexp (test_mixing.py:" in note
