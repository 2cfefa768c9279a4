"""One rank may explain or plan a program alone, before and between steps: it compiles afterwards what the others do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.associative_scan import associative_scan

import ringopt
from tests.frontend.loops import programs
from tests.frontend.loops.test_rolled import inputs, results
from tests.harness.models import difference

EAGER = {"inner_backend": "aot_eager"}


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x @ w, x, x, is_causal=True)


def gated(x: Tensor, w: Tensor) -> Tensor:
    """By torch's associative_scan, which is left to torch on one process."""

    def combine(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return one[0] * other[0], other[0] * one[1] + other[1]

    _, found = associative_scan(combine, (torch.sigmoid(x @ w), x), 1, combine_mode="generic")
    return torch.as_tensor(found @ w)


def picked(x: Tensor, w: Tensor) -> Tensor:
    """A size that data decide."""
    return attention(x, w) + x[x[..., 0] > 0].mean(0)


def by_data(x: Tensor, w: Tensor) -> Tensor:
    """A branch that data decide."""
    y = attention(x, w)
    return y * 2 if y.sum() > 0 else y - 1


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "attention": attention,
    "associative scan": gated,
    "picked rows": picked,
    "branch": by_data,
    "loop over chunks": programs.chunks,
    "rnn": programs.saturates,
}


def trained(name: str, explained: int) -> float:
    """The error of steps, among which rank 0 explains the program for `explained` ranks, of other lengths."""
    torch._dynamo.reset()
    program = PROGRAMS[name]
    run, errors = torch.compile(program, backend="ring", options=EAGER), list[float]()
    for n, others in ((64, (16, 12)), (48, ()), (50, (24,))):
        for other in others if torch.distributed.get_rank() == 0 else ():
            ringopt.explain(program, *inputs(other), world_size=explained, options=EAGER)
        errors.append(difference(results(run, n), results(program, n)))
    return max(errors)


OFTEN = ("attention", "associative scan", "loop over chunks")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo] * (name not in OFTEN)) for name in PROGRAMS]
)
@pytest.mark.parametrize("explained", [8, *(pytest.param(p, marks=pytest.mark.zoo) for p in (1, 2))])
def test_a_rank_that_explains_compiles_what_the_others_do(ranks: Any, name: str, explained: int) -> None:
    for error in ranks(2, trained, name, explained):
        assert error < 1e-10


def of_a_group_that_grew(name: str) -> float:
    torch._dynamo.reset()
    program = PROGRAMS[name]
    run = torch.compile(program, backend="ring", options=EAGER)
    return max(difference(results(run, n), results(program, n)) for n in (64, 48))


@pytest.mark.parametrize("name", ["associative scan", pytest.param("picked rows", marks=pytest.mark.zoo)])
def test_a_process_that_was_alone_before_compiles_what_its_neighbours_do(ranks: Any, name: str) -> None:
    for p in (1, 2):
        assert max(ranks(p, of_a_group_that_grew, name)) < 1e-10
