"""Triangles of which the rows or the columns are shared: each rank keeps its own by where these stand in the whole."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.programs import check


def of_scores(m, x):
    q, k, v = m.qkv(x).chunk(3, -1)
    return torch.tanh(q @ k.mT).tril(-1) @ v


def of_columns(m, x):
    return x + m.linear(x).mT.triu(-2).mT


@pytest.mark.parametrize(
    "step, p, layout, gathered",
    [(of_scores, 2, "zigzag", {"matmul", "output"}), (of_columns, 3, "contiguous", {"output"})],
)
def test_a_rank_keeps_its_part_of_the_triangle(step, p, layout, gathered):
    verdict = check(step, p=p, layout=layout)
    assert {gather.op for gather in verdict.report.gathers} == gathered
