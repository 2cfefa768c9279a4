"""A sum with decays is one scan at any length: as many rows as a guard allows are looked at, and prove fewer."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.passes.test_find_scan import by_matmul, by_sum, by_tril, lower, mamba2, masked_first, of_differences

WIDTH, HEADS, STATE = 6, 3, (2, 4)


class Layer(nn.Module):
    def __init__(self, product, decays):
        super().__init__()
        self.project, self.product, self.decays = nn.Linear(WIDTH, HEADS + HEADS * 8), product, decays

    def forward(self, x):
        a, states = self.project(x).split([HEADS, HEADS * 8], -1)
        found = self.product(-0.1 * F.softplus(a).mT, states.unflatten(-1, (HEADS, *STATE)), self.decays)
        return found[0] + found[1][:, None] if isinstance(found, tuple) else found


def given(rows, batch=2):
    return (torch.randn(batch, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)),)


def by_positions(a):
    """A mask that no constant is."""
    total, rows = a.cumsum(-1), torch.arange(a.shape[-1])
    later = rows[None] > rows[:, None]
    return torch.where(later, -torch.inf, total[..., :, None] - total[..., None, :]).exp()


FOUND = [
    (mamba2, masked_first), (mamba2, of_differences), (by_sum, by_tril), (by_sum, by_positions),
    (by_matmul, masked_first),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("product, decays", FOUND, ids=lambda each: each.__name__)
def test_any_length_and_batch_is_one_scan(product, decays, p):
    calls = [given(rows, batch) for rows, batch in ((40, 2), (53, 3), (13, 2), (250, 4))]
    (report,) = run_over(Layer(product, decays).double(), calls, p, dynamic=True).reports
    assert "a recurrence of any number of steps is one scan" in str(report.notes)
    assert [site.strategy for site in report.sites] == ["states"] and report.sharded_fraction == 1.0


def test_more_rows_than_were_looked_at_are_another_graph():
    calls = [given(rows) for rows in (40, 300, 290)]
    reports = run_over(Layer(by_sum, masked_first).double(), calls, 2, dynamic=True).reports
    assert len(reports) == 2 and all([site.strategy for site in each.sites] == ["states"] for each in reports)


def test_one_process_has_no_guard_and_keeps_its_sums():
    """And all else that it gains."""
    calls = [given(rows) for rows in (40, 53)]
    (report,) = run_over(Layer(by_sum, masked_first).double(), calls, 1, dynamic=True).reports
    assert not report.sites and "gains nothing" not in str(report.notes)


def of_sums(total):
    return (total[..., :, None] - total[..., None, :]).masked_fill(~lower(total.shape[-1]), -torch.inf).exp()


# ---- what is right with 256 rows alone, or is not known to be right with others --------------------------------------
NOT_FOUND = {
    "a mask by the length": lambda a: of_differences(a) * lower(a.shape[-1], a.shape[-1] - 256),
    "sums by the length": lambda a: of_sums(a.cumsum(-1) * (a.shape[-1] // 256)),
    "sums from the end": lambda a: of_sums(F.pad(-a.flip(-1).cumsum(-1).flip(-1)[..., 1:], (0, 1))),
}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_depends_on_the_length_is_none(name):
    """It may be at each length: then there is a graph a length."""
    calls = [given(rows) for rows in (40, 53)]
    reports = run_over(Layer(by_sum, NOT_FOUND[name]).double(), calls, 2, dynamic=True).reports
    assert "any number of steps" not in str([report.notes for report in reports])
