"""Rows that are copied run by run are those that are copied one by one, and so are their sums."""

from __future__ import annotations

import pytest
import torch

from ringopt.ops.row_runs import FEW, Rows, add_rows, copy_rows, paired_rows

CPU = torch.device("cpu")
LISTS = {
    "none": [],
    "one run": [3, 4, 5],
    "two runs": [7, 8, 0, 1, 2],
    "backwards": [4, 3, 2],
    "again": [1, 2, 1, 2, 2],
    "too many runs": [*range(0, 2 * FEW + 2, 2)],
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("numbers", LISTS.values(), ids=LISTS)
def test_rows_are_read_written_and_added(numbers, dim):
    listed, x = torch.tensor(numbers, dtype=torch.long), torch.randn(2 * FEW + 2, 2 * FEW + 2)
    rows = Rows.of(listed, CPU)
    part = rows.read(x, dim)
    assert torch.equal(part, x.index_select(dim, listed)) and len(rows) == len(numbers)
    summed, wanted = x.clone(), x.clone().index_add_(dim, listed, part)
    rows.add(summed, dim, part)
    torch.testing.assert_close(summed, wanted)
    if len(set(numbers)) == len(numbers):
        written = torch.zeros_like(x)
        rows.write(written, dim, part)
        assert torch.equal(written, torch.zeros_like(x).index_copy_(dim, listed, part))


def test_runs_end_where_either_list_does():
    own, kept = paired_rows(torch.tensor([4, 5, 6, 7]), torch.tensor([0, 1, 5, 6]), CPU)
    assert (own.runs, kept.runs) == (((4, 2), (6, 2)), ((0, 2), (5, 2)))
    x, out = torch.arange(8.0), torch.zeros(8)
    copy_rows(x, own, out, kept, 0)
    assert out.tolist() == [4, 5, 0, 0, 0, 6, 7, 0]
    add_rows(x, own, out, kept, 0)
    assert out.tolist() == [8, 10, 0, 0, 0, 12, 14, 0]


def test_many_single_rows_are_copied_and_added_one_by_one():
    one, other = torch.arange(0, 2 * FEW + 2, 2), torch.arange(2 * FEW, -1, -2)
    own, kept = paired_rows(one, other, CPU)
    assert own.runs == kept.runs == ()
    x, out = torch.randn(2, 2 * FEW + 2), torch.zeros(2, 2 * FEW + 2)
    copy_rows(x, own, out, kept, 1)
    wanted = torch.zeros_like(out).index_copy_(1, other, x[:, one])
    assert torch.equal(out, wanted)
    add_rows(x, own, out, kept, 1)
    assert torch.equal(out, 2 * wanted)


def test_long_lists_of_single_rows_are_no_runs():
    assert Rows.of(torch.arange(0, 2 * FEW + 2, 2), CPU).runs == ()
    assert len(Rows.of(torch.arange(0, 2 * FEW, 2), CPU).runs) == FEW
