"""Sets of rows as ranges."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from ringopt.context_parallel.geometry.rows import count, join, meet, rows_text, without
from tests.context_parallel.drawing import many

ranges = st.builds(range, st.integers(0, 20), st.integers(0, 20))


@given(ranges, ranges)
@settings(many)
def test_meet_is_the_intersection(a: range, b: range) -> None:
    assert set(meet(a, b)) == set(a) & set(b)
    assert len(meet(a, b)) == max(0, meet(a, b).stop - meet(a, b).start)


@given(st.lists(ranges))
@settings(many)
def test_join_is_the_union(some: list[range]) -> None:
    joined = join(some)
    assert [row for rows in joined for row in rows] == sorted(set().union(*some))
    assert all(before.stop < after.start for before, after in pairwise(joined)), "some touch"
    assert all(joined)


@given(ranges, st.lists(ranges))
@settings(many)
def test_without_is_the_difference(rows: range, others: list[range]) -> None:
    left = without(rows, others)
    assert [row for piece in left for row in piece] == sorted(set(rows).difference(*others))
    assert all(left)


def test_join_of_what_touches() -> None:
    assert join([range(4, 6), range(0, 4), range(9, 9), range(7, 8)]) == (range(0, 6), range(7, 8))


def test_count_and_text() -> None:
    rows = (range(0, 4), range(12, 16))
    assert count(rows) == 8
    assert rows_text(rows) == "0:4,12:16"
    assert count(()) == 0
