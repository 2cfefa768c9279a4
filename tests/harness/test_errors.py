"""The largest error is no number that a test passes over."""

from __future__ import annotations

import math

from tests.harness.errors import worst_of


def test_an_error_that_is_not_a_number_is_the_worst() -> None:
    assert worst_of(1e-9, 2e-9) == 2e-9
    assert worst_of(0.0, math.nan, 1e-9) == math.inf
