"""Sequences of different lengths may have different layouts, and what passes between them is laid out anew."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost.simulate import balance
from ringopt.ir.placement import Layouts
from tests.harness.translation import validate

WIDTH, HEADS, NEAR = 16, 2, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(WIDTH, size) for size in (WIDTH, 2 * WIDTH, WIDTH))

    def forward(self, x, memory, mask=None, causal=False):
        heads = [
            t.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for t in (self.q(x), *self.kv(memory).chunk(2, -1))
        ]
        return x + self.out(F.scaled_dot_product_attention(*heads, mask, is_causal=causal).transpose(1, 2).flatten(2))


class Translator(nn.Module):
    """An encoder that looks NEAR, or everywhere, and a causal decoder that looks at what it finds; a loss over labels
    that are the words one place on."""

    def __init__(self, near=True, joined=False):
        super().__init__()
        torch.manual_seed(0)
        self.near, self.joined = near, joined
        self.encode, self.decode, self.cross = Block(), Block(), Block()
        self.words, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
        self.double()

    def forward(self, x, ids):
        i = torch.arange(x.shape[1])
        memory = self.encode(x, x, (i[:, None] - i).abs() < NEAR if self.near else None)
        y = self.words(ids)
        y = self.cross(self.decode(y, y, causal=True), memory)
        loss = F.cross_entropy(self.head(y)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if self.joined:
            y = torch.cat([memory, y], 1)[:, 1:].cumsum(1)
        return loss, y


def given(n, m):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(1, n, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
    return x, torch.randint(11, (1, m), generator=draw)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("p", "n", "m"), [(2, 64, 41), (3, 64, 41), (4, 64, 128), (4, 7, 128)])
def test_an_encoder_that_looks_near_and_a_causal_decoder(p, n, m):
    """Rows of the encoder stay together, for they are needed near; those of the decoder share the triangle. Of 7 rows
    on 4 ranks there can be no zigzag, and the decoder has one all the same."""
    verdict = validate(p, Translator(near=n > 7), *given(n, m))
    assert not verdict.wrong
    assert [site.layout for site in verdict.report.sites] == ["zigzag", "contiguous", "zigzag x contiguous"]
    assert balance(exchange_of(ShardedPattern.of_self_attention("causal", m, p, "zigzag"), "ring")) <= 1.05
    cross = exchange_of(ShardedPattern("full", m, n, p, "zigzag", "contiguous"), verdict.report.sites[2].strategy)
    assert verdict.report.sites[2].bytes_sent > 0 and cross.kv_layout.name == "contiguous"


def test_where_the_sequences_meet_one_is_laid_out_anew():
    verdict = validate(3, Translator(joined=True), *given(64, 41))
    assert not verdict.wrong
    assert "cat: 41 rows, zigzag, are laid out anew, contiguous" in verdict.report.notes


def test_one_that_is_asked_for_is_that_of_all():
    verdict = validate(2, Translator(), *given(64, 41), layout="zigzag")
    assert not verdict.wrong
    assert [site.layout for site in verdict.report.sites] == ["zigzag"] * 3


def test_a_length_that_nobody_attends_over_has_the_layout_of_the_nearest():
    layouts = Layouts("zigzag", ((64, "contiguous"), (41, "zigzag")))
    assert [layouts.of(length) for length in (64, 63, 41, 40, 53, 52)] == [
        *("contiguous", "contiguous", "zigzag", "zigzag", "contiguous", "zigzag")
    ]
    assert Layouts("zigzag").of(5) == "zigzag"
