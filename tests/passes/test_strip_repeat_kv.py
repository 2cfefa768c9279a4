"""KV heads that were repeated for SDPA are un-repeated again, however they were repeated."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.ir.nodes import shape_of
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from ringopt.passes.strip_repeat_kv import StripRepeatKv
from tests.harness.capturing import after
from tests.harness.lengths import run_over

B, HEADS, KV, S, D = 2, 6, 2, 5, 8
GROUPS = HEADS // KV


def expand_and_reshape(x):
    return x[:, :, None].expand(B, KV, GROUPS, S, D).reshape(B, HEADS, S, D)


def repeat_interleave(x):
    return x.repeat_interleave(GROUPS, 1)


def index(x):
    return x[:, torch.arange(HEADS) // GROUPS]


def index_select(x):
    return x.index_select(1, torch.arange(HEADS) // GROUPS)


def before_the_heads_are_split(x):
    """[B, S, KV, D] -> [B, S, HEADS, D] -> [B, HEADS, S, D], through one flat dim."""
    rows = x.transpose(1, 2)[:, :, :, None].expand(B, S, KV, GROUPS, D)
    return rows.reshape(B, S, HEADS * D).view(B, S, HEADS, D).transpose(1, 2).contiguous()


def stack(x):
    return torch.stack([x] * GROUPS, 2).flatten(1, 2)


def tiled(x):
    return x.repeat(1, GROUPS, 1, 1)


def scaled_after(x):
    return repeat_interleave(x) * 2


class Attention(nn.Module):
    def __init__(self, of_k, of_v, kv=KV):
        super().__init__()
        torch.manual_seed(0)
        self.of_k, self.of_v, self.kv = of_k, of_v, kv
        self.q, self.k, self.v = nn.Linear(16, HEADS * D), nn.Linear(16, kv * D), nn.Linear(16, kv * D)

    def forward(self, x):
        q = self.q(x).view(B, S, HEADS, D).transpose(1, 2)
        k, v = (part(x).view(B, S, self.kv, D).transpose(1, 2) * 3 for part in (self.k, self.v))
        return F.scaled_dot_product_attention(q, self.of_k(k), self.of_v(v))


def heads(module):
    """Heads of k and v, and the notes; the output and the gradients stay the same."""
    x = torch.randn(B, S, 16)
    gm, context = after((Normalize(), FindAttention(), StripRepeatKv()), module, x)
    ((node, info),) = context.sites.items()
    expected, (found,) = module(x), gm(*gm.meta["inputs"])
    assert torch.allclose(found, expected, atol=1e-6)
    weights = list(module.parameters())
    for left, right in zip(
        torch.autograd.grad(found.sin().sum(), weights), torch.autograd.grad(expected.sin().sum(), weights), strict=True
    ):
        assert torch.allclose(left, right, atol=1e-5)
    return [shape_of(operand)[1] for operand in node.args[1:3]], info.notes


@pytest.mark.parametrize(
    "spelling", [expand_and_reshape, repeat_interleave, index, index_select, before_the_heads_are_split]
)
def test_repetition_is_stripped(spelling):
    assert heads(Attention(spelling, spelling)) == ([KV, KV], ["6 KV heads repeat 2, which travel"])


def test_keys_and_values_may_be_spelled_differently():
    assert heads(Attention(expand_and_reshape, index))[0] == [KV, KV]


def test_one_head_for_all_queries():
    assert heads(Attention(lambda x: x.expand(B, HEADS, S, D), lambda x: x.repeat(1, HEADS, 1, 1), kv=1))[0] == [1, 1]


@pytest.mark.parametrize("spelling", [tiled, scaled_after, stack])
def test_what_is_no_plain_repetition_stays(spelling):
    """Tiled heads are h % KV, not h // groups; a product after the repetition would have to be computed again."""
    assert heads(Attention(spelling, spelling)) == ([HEADS, HEADS], [])


def test_keys_and_values_must_agree():
    said = "KV heads travel as they are repeated: K has 2 of its own, V 6"
    assert heads(Attention(repeat_interleave, scaled_after)) == ([HEADS, HEADS], [said])


def test_heads_that_do_not_repeat_stay():
    assert heads(Attention(lambda x: x, lambda x: x, kv=HEADS)) == ([HEADS, HEADS], [])


def test_of_a_longer_cache_the_rows_are_no_others():
    """What is read has the rows that the attention has, and not those that the cache holds."""

    def attention(q, k):
        k = k.repeat_interleave(GROUPS, 1)[:, :, :S]
        return F.scaled_dot_product_attention(q, k, k)

    given = torch.randn(B, HEADS, S, D), torch.randn(B, KV, 2 * S, D)
    gm, context = after([Normalize(), FindAttention(), StripRepeatKv()], attention, *given)
    (site,) = context.sites
    assert shape_of(site.args[1])[2] == S
    torch.testing.assert_close(gm(*gm.meta["inputs"])[0], attention(*given))


class OfAnyLength(nn.Module):
    """Repeated heads, and keys in another order, which nothing repeats."""

    def __init__(self, of_k):
        super().__init__()
        torch.manual_seed(0)
        self.of_k, self.qkv = of_k, nn.Linear(D, (HEADS + 2 * KV) * D)
        self.double()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, D)).transpose(1, 2).split((HEADS, KV, KV), 1)
        return F.scaled_dot_product_attention(q, self.of_k(repeat_interleave(k)), repeat_interleave(v))


@pytest.mark.parametrize("of_k, stripped", [(lambda k: k, True), (lambda k: k.flip(2), False)])
def test_no_length_is_fixed_to_find_that_nothing_is_repeated(of_k, stripped):
    calls = [(torch.randn(B, rows, D, dtype=torch.float64),) for rows in (13, 9, 11)]
    reports = run_over(OfAnyLength(of_k), calls, 2).reports
    assert len(reports) == 2  # for the first length, and for any
    notes = [note for report in reports for site in report.sites for note in site.notes]
    assert any("which travel" in note for note in notes) == stripped
