"""Generated programs whose sizes coincide: no dim is taken for another of its size, no value for rows by its length."""

from __future__ import annotations

import pytest

from ringopt.dims.rule import Rule, same_dims
from ringopt.dims.rules import RULES
from ringopt.dims.view_rules import transpose
from ringopt.ir.nodes import shape_of
from tests.generated.coincidences import Coincidence, draw
from tests.generated.test_programs import check, failed, verdict

TENS = range(0, 2000, 10)


@pytest.mark.parametrize("first", [pytest.param(first, marks=[pytest.mark.zoo] if first else []) for first in TENS])
def test_programs_whose_sizes_coincide(first):
    """Ten of them; with -m zoo two thousand."""
    check(first, 10, 3, draw)


@pytest.mark.parametrize("length", [8, 12])
def test_a_dim_that_is_told_by_its_size_is_found(monkeypatch, length):
    """A transpose that keeps the sizes is taken for one that changes nothing: seen where sizes coincide."""

    def by_size(node):
        given = shape_of(node.args[0])
        return Rule((same_dims(len(given)),)) if shape_of(node) == given else transpose(node)

    for name in ("transpose", "mT"):
        monkeypatch.setitem(RULES, name, by_size)
    attention = "q, k, v = projected(x, p); x = x + merge(sdpa(q, k, v))"
    program = Coincidence((attention, "x = x + x.mT @ x @ p(W, W)"), ("logits.square().mean()", "loss,"), 2, length)
    assert failed(verdict(program, 2, "contiguous")) is (length == 8)
