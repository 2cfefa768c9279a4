"""What operands of one place have in common over the iterations of an unrolled loop."""

from __future__ import annotations

import pytest

from ringopt.recognize.scans.operands import Counted, Outside, common


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([3, 3, 3], Outside(3)),
        ([3, 5, 7], Counted(3, 2)),
        ([3, 2, 1], Counted(3, -1)),
        ([3, 5, 8], None),  # the first two make a step, which the third does not take
        ([3, 3, 4], None),
        ([3.0, 5.0, 7.0], None),  # places are whole numbers
        ([True, False, True], None),
    ],
)
def test_numbers_of_all_iterations(values, found):
    assert common(values, {}) == found
