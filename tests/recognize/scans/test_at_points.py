"""Views of tensors at two of the elements beside their rows."""

from __future__ import annotations

import pytest

from ringopt.recognize.scans.at_points import NotAlike, few, view_of_few

VIEWS = {
    "rows are split": ((5, 8, 7), (2, 8, 2), (5, 4, 2, 7), [2, 4, 2, 2]),
    "rows are joined": ((5, 4, 2, 7), (2, 4, 2, 2), (5, 8, 7), [2, 8, 2]),
    "dims of one index come and go": ((5, 1, 8, 7), (2, 1, 8, 2), (5, 8, 1, 7, 1), [2, 8, 1, 2, 1]),
    "a few that are all": ((2, 8), (2, 8), (16,), [16]),
    "nothing": ((5, 8), (2, 8), (5, 8), [2, 8]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_few(name: str) -> None:
    whole, here, out, wanted = VIEWS[name]
    assert view_of_few(whole, here, out) == wanted


@pytest.mark.parametrize(
    "whole, here, out", [((5, 8), (2, 8), (40,)), ((40, 3), (2, 3), (5, 8, 3)), ((8, 5, 3), (8, 2, 2), (8, 15))]
)
def test_few_are_not_merged_or_split(whole: tuple[int, ...], here: tuple[int, ...], out: tuple[int, ...]) -> None:
    with pytest.raises(NotAlike):
        view_of_few(whole, here, out)


def test_rows_are_all_there() -> None:
    assert few((5, 1, 8, 7), -2) == [2, 1, 8, 2]
