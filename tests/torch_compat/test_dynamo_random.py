"""What is true of any number that may be drawn ends no graph."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ringopt.torch_compat.dynamo_random import know_what_no_draw_reaches
from tests.torch_compat.test_dynamo_logging import Counting


def uniform(x: Tensor, probability: float) -> Tensor:
    y = x.sin()
    for _ in range(2):
        y = y * 2 if random.uniform(-1, 1) >= probability else y
    return y


@pytest.mark.parametrize("probability, known", [(-1, True), (0.0, False)])
def test_a_branch_that_no_draw_takes_ends_no_graph(probability: float, known: bool) -> None:
    """The numbers are drawn all the same: those that follow are as in eager."""
    know_what_no_draw_reaches()
    torch._dynamo.reset()
    counting, x = Counting(), torch.ones(2)
    compiled = torch.compile(uniform, backend=counting)
    for seed in range(3):
        random.seed(seed)
        expected, after = uniform(x, probability), random.random()
        random.seed(seed)
        assert torch.equal(compiled(x, probability), expected) and random.random() == after
    assert (counting.count == 1) == known
