"""Products that make pairs of the rows of one input: an operand keeps its rows, the other's are gathered.

    einsum("bsic,bsjd->bijcd", a, b)   ->   einsum("bsic,bsjd->bijcd", a_rows, gather(b_rows))

The outer product mean (Jumper et al. 2021) sums over sequences that were aligned, which are rows of the input as well:
shared by these, each rank would have all pairs, and the layers behind them, whole.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from tests.harness.lengths import run_over
from tests.harness.translation import validate

ALIGNED, WIDTH = 5, 8


class Aligned(nn.Module):
    """Of aligned sequences m [B, S, N, C] and pairs z [B, N, N, C]; `averaged`: the pairs say how m is averaged
    before."""

    def __init__(self, averaged: bool):
        super().__init__()
        torch.manual_seed(0)
        self.averaged, self.norm = averaged, nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3, bias=False) for _ in range(2))
        self.out = nn.Linear(9, WIDTH)
        self.double()

    def forward(self, m, z):
        if self.averaged:
            m = m + torch.einsum("bij,bsjd->bsid", z.mean(-1).softmax(-1), m)
        left, right = (layer(self.norm(m)) for layer in self.layers)
        return m.tanh(), z + self.out(torch.einsum("bsic,bsjd->bijcd", left, right).flatten(3))


def given(rows=12, sequences=ALIGNED):
    torch.manual_seed(1)
    made = torch.randn(2, sequences, rows, WIDTH), torch.randn(2, rows, rows, WIDTH)
    return [x.double().requires_grad_() for x in made]


@pytest.mark.parametrize("averaged, p", [(False, 2), (True, 3)])
def test_pairs_are_of_the_rows_of_a_rank(averaged, p):
    verdict = validate(p, Aligned(averaged), *given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["einsum", "output", "output"]
    # What aligned sequences have beside their rows is no key: no pairs of tokens and sequences are made.
    assert not any("no site" in note for note in verdict.report.notes)


def test_many_sequences_of_few_rows_are_shared():
    """Then the pairs are few, and each rank has all of them."""
    verdict = validate(2, Aligned(False), *given(4, 200))
    assert verdict.wrong == "" and verdict.report.sharded_fraction < 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_lengths_that_are_open():
    reports = run_over(Aligned(True), [tuple(given(rows)) for rows in (12, 15, 9)], 2, dynamic=True).reports
    assert [report.sharded_fraction for report in reports] == [1.0] * len(reports)
