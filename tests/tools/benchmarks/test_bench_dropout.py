"""`ringopt bench dropout`: its rows, and that an unfair draw or another gradient is told. No time is asserted."""

from __future__ import annotations

import argparse
import math
from unittest.mock import MagicMock

import pytest
import torch

from ringopt.tools.benchmarks.tables import dropout
from ringopt.tools.benchmarks.workers.dropout import drops, wrong


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
def test_a_row_is_right(inner: str) -> None:
    row = drops(32, 64, "float32", inner, 1)
    assert row["elements"] == 2048 and row["inner"] == inner and row["error"] < 1e-6
    assert row["ratio"] == row["ring_seconds"] / row["torch_seconds"] > 0


def test_what_is_wrong() -> None:
    kept = torch.arange(1000) % 10 != 3
    given = torch.rand(1000) + 1
    assert wrong(kept * 1.0, kept * given / 0.9, given) < 1e-6
    assert wrong(kept * 1.0, kept.roll(1) * given / 0.9, given) > 0.1, "the gradient drops others"
    assert wrong(torch.ones(1000), given / 0.9, given) == math.inf, "nothing is dropped"


def test_a_table_of_rows() -> None:
    arguments = argparse.Namespace(elements=[100], repeats=1)
    bar = MagicMock()
    bar.track = lambda cases, description: [case for case in cases if case[2] == "eager"]
    result = dropout.measure(arguments, bar)
    assert [row["elements"] for row in result.rows] == [1024, 1024], "whole rows"
    assert [row["dtype"] for row in result.rows] == ["float32", "bfloat16"]
    first, second = (row["ratio"] for row in result.rows)
    assert result.totals["ratios"] == pytest.approx({"eager": math.sqrt(first * second)})
    assert result.totals["most"] == max(first, second) and result.totals["error"] < 0.01
    assert result.sentences[0].startswith("ring / torch, geometric means: eager ")
