"""Branches that attention does not demand: where they are much of the work, what all is made of is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, ROWS = 8, 13


class Model(nn.Module):
    """Attention, and beside it `branch(model, x)`, [B, S, D] or [B, D] or [B, 1, D]."""

    def __init__(self, branch):
        super().__init__()
        torch.manual_seed(0)
        self.branch, self.qkv, self.beside = branch, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.keys, self.slots = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(3, WIDTH))
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True) + self.branch(self, x)


def linformer(model, x):
    """Keys and values projected to four (Wang et al. 2020): sums over all tokens."""
    q, k, v = model.beside(x).chunk(3, -1)
    few = model.keys[:, : x.shape[1]]
    return (q @ (few @ k).mT).softmax(-1) @ (few @ v)


def slot_attention(model, x):
    """Slots that compete for tokens (Locatello et al. 2020), read back by every token."""
    _, k, v = model.beside(x).chunk(3, -1)
    weights = (k @ model.slots.mT).softmax(-1)
    slots = (weights / weights.sum(1, keepdim=True)).mT @ v
    return (x @ slots.mT).softmax(-1) @ slots


def pooled(model, x):
    """A squeeze and excitation: the mean of what layers make."""
    return model.down(model.up(x).relu()).mean(1, keepdim=True)


def nearest(model, x):
    """Each token reads the four others that are most like it: the keys are gathered, and made in rows before."""
    q, k, v = model.beside(x).chunk(3, -1)
    best, place = (q @ k.mT).topk(4, -1)
    return (best.softmax(-1)[..., None] * torch.stack([row[at] for row, at in zip(v, place, strict=True)])).sum(2)


def given(rows=ROWS):
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo), pytest.param(4, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("branch", [linformer, slot_attention, pooled, nearest])
def test_a_branch_is_on_shards(branch, p):
    verdict = validate(p, Model(branch), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction > 0.97
    gathered = [gather.op for gather in verdict.report.gathers if gather.op != "output"]
    assert bool(gathered) == (branch is nearest)


def test_a_branch_of_little_work_is_left_alone():
    """To cut the input for it would send a sum that every rank has for nothing."""
    beside = (lambda model, x: (x @ model.slots[:1].mT).mean(1, keepdim=True)), (lambda model, x: 0)
    sums, nothing = (validate(2, Model(branch), given()) for branch in beside)
    assert sums.wrong == "" and sums.report.bytes_sent == nothing.report.bytes_sent


@pytest.mark.parametrize("branch", [linformer, pytest.param(slot_attention, marks=pytest.mark.zoo)])
def test_at_any_length(branch):
    reports = run_over(Model(branch), [(given(rows),) for rows in (12, 17, 21)], 2).reports
    assert len(reports) == 2 and all(report.sharded_fraction > 0.97 for report in reports)
