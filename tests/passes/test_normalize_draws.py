"""After normalize random numbers are those of the program, whoever writes them, and none are drawn to no end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, assert_same, ops
from tests.passes.test_normalize import Body


def noise_by_hand(m, x):
    y = m.linear(x)
    noise = torch.rand_like(y) + torch.empty_like(y).exponential_().log() + torch.zeros_like(y).normal_(1, 2)
    return (y + noise) * y.new_empty(2, 1, 1).bernoulli_()


def test_random_numbers_are_those_of_the_program_and_need_no_value():
    captured, _ = after([], Body(noise_by_hand), torch.randn(2, 5, 8))
    gm, _ = after([Normalize()], Body(noise_by_hand), torch.randn(2, 5, 8))
    assert [name for name in ops(gm) if name in ("rand", "rand_like", "zeros_like")] == ["rand"]

    def seeded(run):
        return lambda *inputs: torch.manual_seed(0) and run(*inputs)

    assert_same(seeded(gm), seeded(captured), gm.meta["inputs"])


@pytest.mark.parametrize("inplace", (False, True))
def test_dropout_that_drops_nothing_goes(inplace):
    gm, _ = after([Normalize()], Body(lambda m, x: F.dropout(m.linear(x), 0.0, True, inplace)), torch.randn(2, 8))
    assert ops(gm) == ["linear"]


@pytest.mark.parametrize("drop", (F.dropout, F.alpha_dropout, F.feature_alpha_dropout), ids=lambda f: f.__name__)
def test_dropout_in_place_is_dropout(drop):
    found, _ = after([Normalize()], Body(lambda m, x: drop(m.linear(x), 0.3, True, True) + 1), torch.randn(2, 5, 8))
    right, _ = after([Normalize()], Body(lambda m, x: drop(m.linear(x), 0.3, True) + 1), torch.randn(2, 5, 8))
    assert ops(found) == ops(right)


def test_zeros_like_rows_that_nobody_else_reads_need_no_rows():
    """Over ranks the rows would be fetched, for their shape."""

    def framed(x):
        return torch.cat([torch.zeros_like(x[:, :1]), torch.ones_like(x[:, 1:].mT).mT], 1) * x

    x = torch.randn(2, 5, 8)
    gm, _ = after([Normalize()], framed, x)
    assert "slice" not in ops(gm)[:1] and {"zeros", "ones_like"} <= set(ops(gm))
    captured, _ = after([], framed, x)
    assert_same(gm, captured, gm.meta["inputs"])
