"""Slots that are sums over all tokens: the layers that work on them are computed on shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, EXPERTS, ROWS = 8, 3, 13


class Model(nn.Module):
    """Attention, and `mix(model, x)`, of [B, S, D]."""

    def __init__(self, mix):
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.qkv = mix, nn.Linear(WIDTH, 3 * WIDTH)
        self.router, self.slots = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(WIDTH, EXPERTS, 5))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 32))
        self.down = nn.Parameter(torch.randn(EXPERTS, 32, WIDTH) / 8)
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.mix(self, x)


def two_layers(model, given):
    return torch.bmm(torch.bmm(given, model.up).relu(), model.down)


def switch(model, x, layers=two_layers):
    """Experts of a given capacity (Fedus et al. 2021): a token beyond it is dropped."""
    tokens = x.flatten(0, 1)
    gate, expert = model.router(tokens).softmax(-1).max(-1)
    chosen, capacity = F.one_hot(expert, EXPERTS), tokens.shape[0] // EXPERTS + 1
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    places = F.one_hot(place.clamp(max=capacity - 1), capacity) * (place < capacity)[:, None]
    dispatch = (chosen[..., None] * places[:, None]).to(x.dtype)
    given = torch.einsum("tec,td->ecd", dispatch, tokens)
    made = layers(model, given)
    return torch.einsum("tec,ecd->td", dispatch * gate[:, None, None], made).view_as(x)


def soft(model, x):
    """Soft mixtures of experts (Puigcerver et al. 2023): slots are means of tokens."""
    logits = torch.einsum("bsd,den->bsen", x, model.slots)
    given = torch.einsum("bsd,bsen->bend", x, logits.softmax(1))
    made = torch.einsum("benf,efd->bend", torch.einsum("bend,edf->benf", given, model.up).relu(), model.down)
    return torch.einsum("bend,bsen->bsd", made, logits.flatten(2).softmax(-1).view_as(logits))


def projected(model, x):
    """Keys that are sums of all (Linformer): no layers work on them."""
    keys = model.slots.flatten(1).mT[:, :WIDTH] @ x.mT @ x
    return (x @ keys.mT).softmax(-1) @ keys


def given(rows=ROWS):
    torch.manual_seed(rows)
    return torch.randn(2, rows, WIDTH, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo), pytest.param(4, marks=pytest.mark.zoo)])
@pytest.mark.parametrize("mix", [switch, soft])
def test_layers_on_slots_are_on_shards(mix, p):
    verdict = validate(p, Model(mix), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    (gathered,) = (gather.op for gather in verdict.report.gathers if gather.op != "output")
    assert gathered == "einsum"  # what the layers give goes to all tokens


def test_slots_without_layers_stay_whole():
    verdict = validate(2, Model(projected), given())
    assert verdict.wrong == "" and all(gather.op == "output" for gather in verdict.report.gathers)


def test_what_one_product_gives_is_not_worth_a_gather():
    def mix(model, x):
        return switch(model, x, lambda model, given: torch.bmm(given, model.up[..., :WIDTH]).relu())

    verdict = validate(2, Model(mix), given())
    assert verdict.wrong == "" and [gather.op for gather in verdict.report.gathers] == ["output"]


def test_at_any_length():
    reports = run_over(Model(soft), [(given(rows),) for rows in (12, 17, 21)], 2).reports
    assert [report.sharded_fraction for report in reports] == [1.0, 1.0]
