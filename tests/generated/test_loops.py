"""Generated loops: none that is no recurrence affine in its state becomes a scan, and what becomes one has the numbers
of the loop on any number of ranks. Programs without loops have no scan."""

from __future__ import annotations

from typing import Any

import pytest

from ringopt.passes.find_scan import FindScan
from ringopt.passes.normalize import Normalize
from tests.generated.drawing import INVALID
from tests.generated.drawing import draw as draw_without_loops
from tests.generated.loops import draw
from tests.generated.test_programs import check
from tests.harness.capturing import after, ops


def tens(count: int) -> list[Any]:
    """Where they begin; with -m zoo those behind the first."""
    return [pytest.param(first, marks=[pytest.mark.zoo] if first else []) for first in range(0, count, 10)]


@pytest.mark.parametrize("first", tens(1000))
def test_a_thousand_loops(first: int) -> None:
    count = 10 if first else 5  # in the normal run
    found = check(first, count, most=2, draw=draw)
    assert found["exact"] > count // 3, found


@pytest.mark.parametrize("first", tens(9000))
def test_nine_thousand_programs_without_loops(first: int) -> None:
    for seed in range(first, first + 10):
        program = draw_without_loops(seed, 2)
        try:
            inputs = program.inputs()
        except INVALID:
            continue
        gm, _ = after([Normalize(), FindScan()], program, *inputs)
        assert "scan" not in ops(gm), f"seed {seed}\n{program}"
