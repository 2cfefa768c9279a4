"""A recurrence whose ranks share a batch or heads that know nothing of each other: any step, whether affine or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ringopt.ops import collectives
from tests.harness.translation import Verdict, validate

WIDTH = 8


class Cell(nn.Module):
    """A loop over tokens around a step of `kind`, which begins with the first token."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.into, self.again, self.out = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        new = self.into(x)
        h = c = x[:, 0] * 0.3
        outs = []
        for t in range(x.shape[1]):
            if self.kind == "tanh":
                h = (new[:, t, :WIDTH] + self.again(h)[:, :WIDTH]).tanh()
            elif self.kind == "lstm":
                i, f, o, g = (new[:, t] + self.again(h)).chunk(4, -1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
            else:
                h = h * new[:, t, :WIDTH].sigmoid() + new[:, t, WIDTH : 2 * WIDTH]
            outs.append(h)
        return x + self.out(torch.stack(outs, 1)), h


class Columns(nn.Module):
    """One sequence and one head: only the columns of the state know nothing of each other, and all have the keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.k, self.v = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v = F.normalize(self.k(x), dim=-1), self.v(x)
        state, outs = x.new_zeros(1, 3, WIDTH), []
        for t in range(x.shape[1]):
            state = state + k[:, t, :, None] * (v[:, t] - (k[:, t, None] @ state)[:, 0])[:, None] * 0.5
            outs.append((k[:, t, None] @ state)[:, 0])
        return torch.stack(outs, 1)


def verdict(p: int, module: nn.Module, batch: int, tokens: int = 13, **options: Any) -> Verdict:
    x = torch.randn(batch, tokens, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = validate(p, module.double(), x.requires_grad_(), **options)
    assert found.wrong == ""
    return found


@pytest.mark.parametrize(("kind", "p", "batch", "layout"), [("tanh", 2, 4, "zigzag"), ("lstm", 3, 3, "contiguous")])
def test_a_step_that_is_not_affine_runs_by_heads(kind: str, p: int, batch: int, layout: str) -> None:
    found = verdict(p, Cell(kind), batch, layout=layout)
    (site,) = found.report.sites
    assert (site.form, site.strategy, site.refusal) == ("scan", "heads", None)
    assert any(note.startswith("shared by heads, for a step is not affine") for note in site.notes)
    assert f"each rank has {batch // p} of {batch} independent indices" in site.notes
    assert found.report.sharded_fraction == 1.0
    assert [gather.op for gather in found.report.gathers] == ["output"]


@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.zoo)])
def test_an_affine_one_by_heads_where_that_was_asked_for(p: int) -> None:
    """Else by states. What is sent is told."""
    found = verdict(p, Cell("affine"), batch=1, tokens=16, strategy="ulysses")
    (site,) = found.report.sites
    assert site.strategy == "heads" and [one.strategy for one in site.predictions] == ["heads", "states"]
    rows = 16 * WIDTH * 8 // p
    assert site.bytes_sent == 3 * rows * (p - 1) // p  # gates and addends there, outputs back
    assert verdict(p, Cell("affine"), batch=1, tokens=16).report.sites[0].strategy == "states"


def test_what_heads_have_in_common_goes_to_all_ranks() -> None:
    (site,) = verdict(2, Columns(), 1, strategy="ulysses").report.sites
    assert site.strategy == "heads" and "each rank has 4 of 8 independent indices" in site.notes
    assert any(note.startswith("what all heads have in common goes to all ranks") for note in site.notes)


def test_gradients_of_what_heads_share_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives._CopyToGroup, "backward", staticmethod(lambda ctx, grad: (grad, None)))
    with pytest.raises(AssertionError, match="gradient"):
        verdict(2, Columns(), 1, strategy="ulysses")
