"""How many rows a rank holds, asked when a program for any number of ranks runs."""

from __future__ import annotations

import pytest

from ringopt.errors import PlanError
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
