"""Of which rows of a tensor the turns of a loop take parts."""

from __future__ import annotations

from typing import Any

import pytest

from ringopt.recognize.scans.operands import Counted, Outside
from ringopt.recognize.scans.sources import PartPlaces, places_of

DIM, FOURS, NEXT = Outside(1), Counted(0, 4), Counted(4, 4)


@pytest.mark.parametrize(
    "name, numbers, expected",
    [
        ("select", [DIM, Counted(3, -1)], PartPlaces(1, 3, -1)),
        ("narrow", [DIM, FOURS, Outside(4)], PartPlaces(1, 0, 4, 4)),
        ("narrow", [DIM, FOURS, NEXT], None),
        ("slice", [DIM, FOURS, NEXT, Outside(1)], PartPlaces(1, 0, 4, 4)),
        ("slice", [DIM, FOURS, NEXT], PartPlaces(1, 0, 4, 4)),
        ("slice", [DIM, FOURS, NEXT, Outside(2)], None),
        ("slice", [DIM, FOURS], None),
        ("slice", [DIM, FOURS, Counted(4, 8), Outside(1)], None),
    ],
)
def test_parts_of_a_loop(name: str, numbers: list[Any], expected: PartPlaces | None) -> None:
    """Of an open size a slice may lack its step, or both its end and its step, as in `x[:, 4 * i :]`."""
    assert places_of(name, numbers) == expected
