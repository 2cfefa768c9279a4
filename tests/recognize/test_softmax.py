"""How a softmax is spelled out, piece by piece."""

from __future__ import annotations

import pytest
import torch

from ringopt.expr.simplify import apply
from ringopt.expr.terms import axis, load
from ringopt.recognize.softmax import puts_zero

WEIGHT = load("weight", [axis("q"), axis("k")], torch.float32)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "puts"),
    [
        ("nan_to_num", [], [], True),  # as PyTorch has it
        ("nan_to_num", [None], [], True),
        ("nan_to_num", [0.0], [], True),
        ("nan_to_num", [0.5], [], False),
        ("nan_to_num", [], [("nan", 0.5)], False),
        ("relu", [], [], False),
    ],
)
def test_what_puts_0_for_nan(op, args, kwargs, puts):
    assert puts_zero(apply(op, [WEIGHT, *args], torch.float32, kwargs)) == puts
