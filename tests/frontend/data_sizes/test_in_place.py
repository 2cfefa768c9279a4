"""Attention among tokens that data pick, beside tokens that are always there: all attend, masked, on their shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference, run
from tests.harness.translation import validate

D, HEADS, WORDS = 8, 2, 7


class Model(nn.Module):
    """Of each sample all rows and some of WORDS words attend to each other, as `go` spells it: video models read the
    words of a caption that are no padding."""

    def __init__(self, go):
        super().__init__()
        torch.manual_seed(0)
        self.go, self.words = go, nn.Parameter(torch.randn(2, WORDS, D))
        self.qkv, self.other, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def heads(self, x):
        return [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x, picked):
        both = [self.go(self, x[i : i + 1], self.words[i : i + 1], picked[i]) for i in range(len(x))]
        x = x + self.out(torch.cat([rows for rows, _ in both]).transpose(1, 2).flatten(2))
        return x, torch.cat([words for _, words in both])


def padded(m, x, words, picked):
    """As Mochi: what is attended is padded, and cut again."""
    where = torch.nonzero(picked.flatten(), as_tuple=False).flatten()
    q, k, v = (torch.cat([a, b[:, :, where, :]], 2) for a, b in zip(m.heads(x), m.heads(words), strict=True))
    y = F.scaled_dot_product_attention(q, k, v)
    y = F.pad(y, (0, 0, 0, x.shape[1] + WORDS - y.size(2)))
    return y.split_with_sizes((x.shape[1], WORDS), 2)


def cut(m, x, words, picked):
    """Words before rows, by a mask, in layers of their own. Those that are not picked may be anything."""
    words = words.masked_fill(~picked[:, None], torch.nan)
    some = m.norm(F.gelu(m.other(words[:, picked])))
    number = some.shape[1]
    q, k, v = m.heads(torch.cat([some, x], 1))
    y = F.scaled_dot_product_attention(q, k, v, scale=0.7)
    return y[:, :, number:], x


def put_back(m, x, words, picked):
    """What the words get is written to where they were."""
    (where,) = torch.where(picked)
    q, k, v = m.heads(torch.cat([x, words.index_select(1, where)], 1))
    y = F.scaled_dot_product_attention(q, k, v)
    rows, some = y.split([x.shape[1], len(where)], 2)
    out = m.heads(words)[2] * 1
    out[:, :, where] = some
    return rows, out


def causal(m, x, words, picked):
    where = picked.nonzero().squeeze(-1)
    q, k, v = m.heads(torch.cat([x, words[:, where]], 1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.pad(y, (0, 0, 0, WORDS - len(where)), value=2.0).split([x.shape[1], WORDS], 2)


def added(m, x, words, picked):
    where = picked.nonzero()[:, 0]
    q, k, v = (torch.cat([b[:, :, where], a], 2) for a, b in zip(m.heads(x), m.heads(words), strict=True))
    some, rows = F.scaled_dot_product_attention(q, k, v).split((len(where), x.shape[1]), 2)
    return rows, m.heads(words)[2].index_add(2, where, some)


SPELLINGS = [padded, cut, put_back, causal, added]


def batch(rows=13):
    """Of one sample the words that are picked are not the first; of the other there are none."""
    picked = torch.tensor([[True, False, True, True, False, False, True], [False] * 7])
    x = torch.randn(2, rows, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.requires_grad_(), picked


@pytest.mark.parametrize("p, layout", [(2, "zigzag"), pytest.param(3, "contiguous", marks=pytest.mark.zoo)])
@pytest.mark.parametrize(  # the first is run by real ranks
    "go", [pytest.param(padded, marks=pytest.mark.zoo), *SPELLINGS[1:]]
)
def test_each_rank_works_on_its_own_tokens(go, p, layout):
    verdict = validate(p, Model(go).double(), *batch(), layout=layout)
    assert not verdict.wrong
    assert verdict.report.sharded_fraction > 0.9 and not any(site.refusal for site in verdict.report.sites)


def on_rank(go):
    torch._dynamo.reset()
    model, before = Model(go).double(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    wrong = []
    for rows in (13, 10):
        x, picked = batch(rows)
        given = {"x": x, "picked": picked}
        wrong.append(difference(run(compiled, model, given), run(model, model, given)))
    return worst_of(*wrong), [report.sharded_fraction for report in ringopt.reports()[before:]]


def test_at_several_lengths_on_real_ranks(ranks):
    for error, shares in ranks(2, on_rank, padded):
        assert error < 1e-10
        assert len(shares) == 2 and min(shares) > 0.9


def logarithms(m, x, words, picked):
    """Of a row of zeros it would be infinite."""
    some = words[:, picked]
    some = (some * some).log()
    q, k, v = m.heads(torch.cat([x, some], 1))
    return F.scaled_dot_product_attention(q, k, v)[:, :, : x.shape[1]], x


def mixed(m, x, words, picked):
    q, k, v = m.heads(torch.cat([x, words[:, picked].cumsum(1)], 1))
    return F.scaled_dot_product_attention(q, k, v)[:, :, : x.shape[1]], x


def not_all(m, x, words, picked):
    q, k, v = m.heads(torch.cat([x, words[:, picked.nonzero().flatten()[1:]]], 1))
    return F.scaled_dot_product_attention(q, k, v)[:, :, : x.shape[1]], x


def normed(m, x, words, picked):
    """A row of zeros is divided by 0."""
    some = F.rms_norm(words[:, picked], (D,), eps=0.0)
    q, k, v = m.heads(torch.cat([x, some], 1))
    return F.scaled_dot_product_attention(q, k, v)[:, :, : x.shape[1]], x


def by_their_number(m, x, words, picked):
    where = picked.nonzero().flatten()
    q, k, v = m.heads(torch.cat([x, words[:, where]], 1))
    return F.scaled_dot_product_attention(q * len(where), k, v)[:, :, : x.shape[1]], x


def different(m, x, words, picked):
    """Other sizes that data decide, which no trace may meet twice."""
    values = torch.unique(words.detach()[:, picked].tanh())
    q, k, v = m.heads(torch.cat([x, words[:, picked] * values.std()], 1))
    return F.scaled_dot_product_attention(q, k, v)[:, :, : x.shape[1]], x


def a_part(m, x, words, picked):
    """Of the first seven, which are not those of the words alone."""
    q, k, v = m.heads(torch.cat([words[:, picked], x], 1))
    y = F.scaled_dot_product_attention(q, k, v)
    return y[:, :, -x.shape[1] :] + y[:, :, :1], x


@pytest.mark.parametrize(
    "go, operator",
    [
        (logarithms, "log"), (normed, "rms_norm"), (mixed, "cumsum"), (not_all, "slice"), (by_their_number, "mul"),
        (different, "_unique2"), (a_part, "slice"),
    ],
)  # fmt: skip
def test_what_is_not_known_to_be_the_same_is_left(go, operator):
    x, picked = batch()
    picked[1, 3] = True
    verdict = validate(2, Model(go).double(), x, picked)
    assert not verdict.wrong and f"{operator} is not known to do the same" in verdict.report.refusal
