"""Errors that programs raise by what is in their data end no graph, and are raised on every rank as in eager."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference, run

D, HEADS = 8, 2

Step = Callable[[Tensor], Tensor]


class Guarded(nn.Module):
    """Attention behind a look at its input."""

    def __init__(self, look: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.look = nn.Linear(D, 3 * D), look

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.look(x)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class NotFiniteError(ArithmeticError):
    """Of a program."""


def plain(x: Tensor) -> Tensor:
    if (x < -100).any():
        raise ValueError("too small")
    return x * 2


def in_parts(x: Tensor) -> Tensor:
    if (x.numel() and torch.min(x) < -2000) or torch.max(x) > 100:
        raise OverflowError
    if not torch.isfinite(x).all():
        raise NotFiniteError("not finite")
    assert not (x == -1000).any(), "exactly"
    return x * 2


def by_number(x: Tensor) -> Tensor:
    """As models compare the places for images in a text with the images that there are."""
    places = (x > -100).sum().item()
    if places != x.numel():
        raise ValueError(f"images and places for them do not match: {places}, {x.numel()}")
    return x * 2


def within_other_blocks(x: Tensor) -> Tensor:
    try:
        with torch.autocast("cpu", enabled=False):
            for least in (-300, -200):
                if (x < least).any():
                    raise ValueError("too small")
    except (KeyError, TypeError):
        return x
    finally:
        y = x * 2
    return y


def caught(x: Tensor) -> Tensor:
    try:
        if (x < -100).any():
            raise ValueError("too small")
    except ArithmeticError:
        return x
    except (KeyError, ValueError):
        return x.clamp(min=-1)
    return x * 2


def in_a_branch(x: Tensor) -> Tensor:
    """Without the branch around it, it would be raised always."""
    small = (x < 100).all()
    if (x < -100).any():
        if small:
            raise ValueError("too small")
        x = x.clamp(min=-1)
    return x * 2


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(plain, x, use_reentrant=False)


def number_that_is_used(x: Tensor) -> Tensor:
    if x.min() < -100:
        raise ValueError("too small")
    largest = x.detach().abs().max().item()
    if largest > 50:
        raise ValueError("too large")
    return x * largest


def number_of_rows(x: Tensor) -> Tensor:
    tokens = x.reshape(-1, D)
    rows = torch.where(tokens[:, 0] > 0)[0]
    if rows.numel() > tokens.shape[0]:
        raise ValueError("too many")
    return (tokens * 2).index_add(0, rows, tokens[rows]).view_as(x)


class Watched(Guarded):
    """With weights that only a look at the input reads."""

    def __init__(self, asserts: bool) -> None:
        super().__init__(plain)
        self.watch, self.asserts = nn.Linear(D, 1), asserts

    def forward(self, x: Tensor) -> Tensor:
        if self.asserts:
            assert self.watch(x).sum(), "zero"
        elif not self.watch(x).sum():
            raise ValueError("zero")
        return super().forward(x)


def gradients_of_what_watches(asserts: bool) -> list[Any]:
    torch._dynamo.reset()
    model, before = Watched(asserts).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    compiled(torch.randn(2, 13, D, dtype=torch.float64)).sum().backward()
    return [model.watch.weight.grad, len(ringopt.reports()) - before]


@pytest.mark.parametrize("asserts", [False, True])
def test_what_only_a_check_reads_has_no_gradient(ranks: Any, asserts: bool) -> None:
    """Not one of zeros, which an optimizer would take for one."""
    assert ranks(2, gradients_of_what_watches, asserts) == [[None, 1]] * 2


def felt(model: Any, x: Tensor) -> str:
    try:
        return f"{float(model(x).detach().sum()):.8f}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def on_rank(look: Step) -> tuple[list[float], list[float], list[tuple[str, str]]]:
    torch._dynamo.reset()
    model, before = Guarded(look).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    rows = [torch.randn(2, n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (13, 9, 11)]
    errors = [difference(run(compiled, model, {"x": x}), run(model, model, {"x": x})) for x in rows]
    shares = [report.sharded_fraction for report in ringopt.reports()[before:]]
    felt_of = list[tuple[str, str]]()
    for x, value in product(rows, (-1000.0, 1000.0)):
        x[1, 4, 3] = value  # in the shard of one rank
        felt_of.append((felt(compiled, x), felt(model, x)))
    return errors, shares, felt_of


@pytest.mark.parametrize("look", [plain, in_parts, by_number, within_other_blocks], ids=lambda look: look.__name__)
def test_an_error_that_data_raise_ends_no_graph(ranks: Any, look: Step) -> None:
    """One graph, and one for any other length. What an f-string fills in is not known as the program is written."""
    for errors, shares, all_felt in ranks(2, on_rank, look):
        assert worst_of(*errors) < 1e-10 and shares == [1.0, 1.0]
        for here, eager in all_felt:
            assert eager.startswith(here.split("...")[0])
        assert all("Error: " in here for here, _ in all_felt[::2])


@pytest.mark.parametrize(
    "look", [caught, in_a_branch, checkpointed, number_that_is_used, number_of_rows], ids=lambda look: look.__name__
)
def test_where_that_is_another_program_the_graph_ends_as_ever(ranks: Any, look: Step) -> None:
    for errors, _, all_felt in ranks(2, on_rank, look):
        assert worst_of(*errors) < 1e-10
        assert all(here == eager for here, eager in all_felt)
