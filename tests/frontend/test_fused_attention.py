"""Kernels of attention that a program calls itself are attentions like others, on shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from tests.harness.lengths import run_over
from tests.harness.translation import validate

D, HEADS, ROWS = 8, 2, 13
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Attention(nn.Module):
    """[B, S, D]; `attend(q, k, v)` of [B, H, S, D]."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.qkv = attend, nn.Linear(D, 3 * D)
        self.double()

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


def causal(q, k, v):
    return flash(q, k, v, 0.0, True)[0]


def biased(q, k, v):
    near = -(torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])).abs().to(q)
    return flash(q, k, v, attn_mask=near, scale=0.3)[0]


def merged_by_lse(q, k, v):
    """Two attentions as one, as LongNet (Ding et al. 2023) and rings by hand merge them."""
    (near, here), (all_of_it, there) = flash(q, k, v, 0.0, True), flash(q, k * 2, v, 0.0, False, scale=0.3)
    weights = torch.stack([here, there]).softmax(0).unsqueeze(-1)
    return weights[0] * near + weights[1] * all_of_it


def rows(n):
    return torch.randn(2, n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


@pytest.mark.parametrize(
    "p, attend, sites", [(2, causal, 1), (3, biased, 1), (2, merged_by_lse, 2), (3, merged_by_lse, 2)]
)
def test_its_results_are_those_of_attention_on_shards(p, attend, sites):
    reports = run_over(Attention(attend), [(rows(n),) for n in (13, 9, 11)], p).reports
    assert [len(report.sites) for report in reports] == [sites] * 2
    assert all(report.sharded_fraction == 1 and not report.refusal for report in reports)
    assert not [site.refusal for report in reports for site in report.sites if site.refusal]


def longer_queries(q, k, v):
    """(Each kernel aligns the causal mask of more queries than keys in another way.)"""
    return flash(q, k[:, :, :7], v[:, :, :7], 0.0, True)[0]


def test_what_is_more_than_attention_stays_a_call():
    verdict = validate(2, Attention(longer_queries), rows(ROWS))
    assert not verdict.wrong and not verdict.report.sites
