"""A recurrence in rounds is one scan at any length that has as many rounds: the longest of them proves the others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.recognize.scans.test_parallel_scan import (
    WIDTH,
    Layer,
    doubling,
    in_rounds,
    padded,
    padded_and_cut,
    written_in_place,
)


def given(rows, batch=2):
    return torch.randn(batch, rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def rows_last(a, b):
    a, b, far = a.sigmoid().mT, b.mT, 1
    while far < b.shape[2]:
        b = torch.cat([b[..., :far], b[..., far:] + a[..., far:] * b[..., :-far]], -1)
        a = torch.cat([a[..., :far], a[..., far:] * a[..., :-far]], -1)
        far *= 2
    return b.mT


def all_but_the_first(a, b):
    """As many rows as there are tokens, less one."""
    return F.pad(in_rounds(a[:, 1:], b[:, 1:]), (0, 0, 1, 0))


# As many rounds as the length asks for, which so has a limit in each graph.
FOUND = [in_rounds, padded, padded_and_cut, written_in_place, rows_last, all_but_the_first]


@pytest.mark.sample(3)
@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("program", FOUND)
def test_any_length_is_one_scan(program, p):
    (report,) = run_over(Layer(program), [(given(rows),) for rows in (40, 53, 64, 35)], p, dynamic=True).reports
    assert "a recurrence of any number of steps is one scan" in str(report.notes)
    assert [site.strategy for site in report.sites] == ["states"] and report.sharded_fraction == 1.0


def test_the_batch_may_be_open_too():
    calls = [(given(rows, batch),) for rows, batch in ((40, 2), (53, 3), (41, 5))]
    (report,) = run_over(Layer(in_rounds), calls, 2, dynamic=True).reports
    assert [site.strategy for site in report.sites] == ["states"]


def test_a_length_with_more_rounds_is_another_graph():
    reports = run_over(Layer(in_rounds), [(given(rows),) for rows in (20, 35, 31, 50)], 2, dynamic=True).reports
    assert len(reports) == 2 and all([site.strategy for site in each.sites] == ["states"] for each in reports)


# ---- what is right at the longest length alone -----------------------------------------------------------------------
def from_the_end(a, b):
    """At 64 rows the first round reads the row before, at 53 another one."""
    a, far, more = a.sigmoid(), 1, -b.shape[1] % 4
    while far < b.shape[1]:
        back = far + more if far == 1 else far
        b = torch.cat([b[:, :back], b[:, back:] + a[:, back:] * b[:, :-back]], 1)
        a = torch.cat([a[:, :back], a[:, back:] * a[:, :-back]], 1)
        far *= 2
    return b


def later_from_the_end(a, b):
    return F.pad(from_the_end(a[:, 1:], b[:, 1:]), (0, 0, 1, 0))


def window(a, b):
    """Sixteen rows of any number: no limit of the length says that there are no more."""
    return doubling(a.sigmoid(), b, until=16)


def window_of_few(a, b):
    """Of the twelve at hand it leaves out none, of the longest many."""
    return window(a, b) if b.shape[1] <= 64 else b


@pytest.mark.parametrize("program", [from_the_end, later_from_the_end, window, window_of_few])
def test_what_is_right_at_one_length_is_left_as_it_is(program):
    calls = [(given(rows),) for rows in (12, 40, 53, 60)]
    reports = run_over(Layer(program), calls, 2, dynamic=True).reports
    assert not [site for report in reports for site in report.sites]
