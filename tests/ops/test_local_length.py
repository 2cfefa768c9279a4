"""How many rows a rank holds, asked when a program for any number of ranks runs."""

from __future__ import annotations

import pytest
import torch

from ringopt.errors import PlanError, RingMismatchError
from ringopt.ops import operators as ops
from tests.harness.threads import run_on_threads


def rows(length, layout, p):
    return run_on_threads(p, lambda mesh: ops.rows_here(length, layout, mesh.name, [], "", "", "never"))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_the_rows_of_all_ranks_are_the_sequence(p, layout):
    found = rows(19, layout, p)
    assert sum(found) == 19 and max(found) - min(found) <= 2


def test_a_rank_that_would_have_none_is_an_error_on_all():
    with pytest.raises(PlanError, match="a zigzag sequence of 3 rows, and 2 ranks need 4"):
        rows(3, "zigzag", 2)
    assert rows(2, "contiguous", 2) == [1, 1]
    with pytest.raises(PlanError, match="a contiguous:64x3 sequence of 3 units of 64 rows, and 4 ranks need 4"):
        rows(190, "contiguous:64x3", 4)
    with pytest.raises(PlanError, match=r"a zigzag:64\+3 sequence of 3 units of 64 rows, and 2 ranks need 4"):
        rows(195, "zigzag:64+3", 2)


def test_no_rows_at_all_are_an_error_on_one_rank_too():
    with pytest.raises(PlanError, match="a contiguous sequence of 0 rows, and 1 ranks need 1"):
        rows(0, "contiguous", 1)


def test_a_later_call_with_other_inputs_on_one_rank_is_an_error_before_its_next_message():
    """Where each call is to be checked; the first is before the number is told."""

    def twice(mesh):
        for call in range(2):
            told = [torch.tensor([float(mesh.rank * call)])]
            ops.rows_here(8, "contiguous", mesh.name, told, "x", "a program", "every")
        with pytest.raises(RingMismatchError, match=r"earlier call: x on ranks \[1\]"):
            mesh.all_gather(torch.zeros(1))

    run_on_threads(2, twice)
