"""Into which parts the steps of a scan are cut."""

from __future__ import annotations

import pytest

from ringopt.scans.steps import AT_ONCE, Recurrence
from ringopt.scans.trace import some_outputs
from tests.scans.bodies import diagonal


@pytest.mark.parametrize(
    "steps, at_once, one_by_one",
    [(3, [], 3), (4, [4], 0), (7, [4], 3), (8, [8], 0), (23, [16, 4], 3), (100, [32, 32, 32, 4], 0)],
)
def test_parts_are_powers_of_two_and_fewer_than_four_steps_go_one_by_one(steps, at_once, one_by_one, monkeypatch):
    """For each size that is computed at once a graph is made, so they are few, and three steps are not worth one. Here
    40 steps fit into what is computed at once."""
    scan = diagonal(steps)
    own = Recurrence(scan.text, [x.detach() for x in scan.xs], [x.detach() for x in scan.consts])
    kinds = own.kinds([x.detach() for x in scan.init])
    monkeypatch.setitem(AT_ONCE, "cpu", 40 * sum(kind.bytes for kind in kinds))
    parts = own.parts(kinds, lambda: (some_outputs(scan.text, 1, 2),))
    sizes = [(some.stop - some.start, together) for some, together in parts]
    assert sizes == [*((size, True) for size in at_once), *([(one_by_one, False)] if one_by_one else [])]
    assert [row for some, _ in parts for row in range(some.start, some.stop)] == list(range(steps))
