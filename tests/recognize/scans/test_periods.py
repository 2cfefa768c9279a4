"""Stretches in which the same calls come again and again."""

from __future__ import annotations

import pytest

from ringopt.recognize.scans.periods import Repeat, stretches


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ("abcabca", [Repeat(0, 7, 3)]),  # one call of the third iteration
        ("abcabc", []),
        ("xaaay", [Repeat(1, 4, 1)]),
        ("xaay", []),
    ],
)
def test_two_periods_and_something_of_a_third_are_a_stretch(calls: str, found: list[Repeat]) -> None:
    assert stretches([(call,) for call in calls]) == found
