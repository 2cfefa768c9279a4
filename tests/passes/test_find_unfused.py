"""Attention that is spelled out becomes the canonical node, whatever is done to its scores and weights; the program
stays the program on one rank and on two, in every gradient."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from expecttest import assert_expected_inline

from ringopt.ir.nodes import is_tensor, shape_of
from ringopt.ir.printer import changes, short
from ringopt.passes.find_softmax import FindSoftmax
from ringopt.passes.find_unfused import FindUnfused
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after
from tests.harness.translation import validate

BATCH, HEADS, ROWS, DEPTH = 2, 3, 13, 8
WIDTH, SCALE = HEADS * DEPTH, DEPTH**-0.5


class Model(nn.Module):
    """`core` computes attention from q, k, v [B, H, S, D] and a mask m [B, S] of 0 and 1."""

    def __init__(self, core):
        super().__init__()
        torch.manual_seed(0)
        self.core = core
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature, self.sink = nn.Parameter(torch.rand(HEADS, 1, 1) + 0.5), nn.Parameter(torch.randn(HEADS))
        self.table, self.places = nn.Parameter(torch.randn(2 * ROWS, HEADS)), nn.Parameter(torch.randn(2 * ROWS, DEPTH))
        self.mix, self.mixer = nn.Parameter(torch.randn(HEADS, HEADS)), nn.Linear(ROWS, ROWS)
        self.register_buffer("triangle", torch.ones(ROWS, ROWS).tril())
        self.double()

    def forward(self, x, m):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, DEPTH).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(self.core(self, q, k, v, m).transpose(1, 2).reshape(b, -1, WIDTH))


def given():
    torch.manual_seed(1)
    m = torch.ones(BATCH, ROWS, dtype=torch.long)
    m[1, :4] = 0
    return torch.randn(BATCH, ROWS, WIDTH, dtype=torch.float64, requires_grad=True), m


def away():
    return torch.arange(ROWS)[None] - torch.arange(ROWS)[:, None]


def padding(m):
    return m[:, None, None] == 0


# ---- what is done to scores ------------------------------------------------------------------------------------------
def relative_bias(s, q, k, v, m):
    return (q @ k.mT + s.table[away() + ROWS].permute(2, 0, 1)[None]).softmax(-1) @ v


def relative_keys(s, q, k, v, m):
    return (q @ k.mT * SCALE + torch.einsum("bhqd,qkd->bhqk", q, s.places[away() + ROWS])).softmax(-1) @ v


def places_of_both(s, q, k, v, m):
    """Content to position and position to content (DeBERTa, He et al. 2021, section 3.1)."""
    of_queries, of_keys = (
        torch.gather(x @ s.places.t(), -1, place.expand(BATCH, HEADS, ROWS, ROWS))
        for x, place in ((q, away() + ROWS), (k, ROWS - away()))
    )
    return ((q @ k.mT + of_queries + of_keys.mT) * SCALE).softmax(-1) @ v


def shifted_places(s, q, k, v, m):
    """The shift of Transformer-XL: row q of [q, 2n - 1] starts at place n - 1 - q."""
    scores = q @ s.places[: 2 * ROWS - 1].t()
    scores = F.pad(scores, (1, 0)).view(BATCH, HEADS, 2 * ROWS, ROWS)[:, :, 1:]
    return ((q @ k.mT + scores.view(BATCH, HEADS, ROWS, 2 * ROWS - 1)[..., :ROWS]) * SCALE).softmax(-1) @ v


def sinks(s, q, k, v, m):
    """As gpt-oss does it: one more column, and the row's maximum taken off before softmax."""
    scores = (q @ k.mT * SCALE).masked_fill(away() > 0, -math.inf)
    scores = torch.cat([scores, s.sink.view(1, -1, 1, 1).expand(BATCH, -1, ROWS, 1)], -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def sinks_in_front(s, q, k, v, m):
    scores = torch.cat([s.sink.view(1, -1, 1, 1).expand(BATCH, -1, ROWS, 1), q @ k.mT * SCALE], -1)
    return scores.softmax(-1)[..., 1:] @ v


def filled(scores, m, value):
    return scores.masked_fill(padding(m), value)


LOWEST = torch.finfo(torch.float64).min

# name: (core, the pattern that the report names)
SCORES = {
    "scaled before": (lambda s, q, k, v, m: ((q * SCALE) @ k.mT).softmax(-1) @ v, "full"),
    "scaled with its mask": (
        lambda s, q, k, v, m: ((q @ k.mT).masked_fill(away() > 0, -math.inf) * SCALE).softmax(-1) @ v,
        "causal",
    ),
    "a triangle kept as a buffer": (
        lambda s, q, k, v, m: (q @ k.mT).masked_fill(s.triangle == 0, -math.inf).softmax(-1) @ v,
        "causal",
    ),
    "a window": (
        lambda s, q, k, v, m: (q @ k.mT).masked_fill(away().abs() > 3, -1e9).softmax(-1) @ v,
        "window(4,both)",
    ),
    "a temperature of each head": (lambda s, q, k, v, m: (q @ k.mT * s.temperature).softmax(-1) @ v, "full"),
    "divided by a function of it": (
        lambda s, q, k, v, m: (q @ k.mT / s.temperature.exp().clamp(max=100)).softmax(-1) @ v,
        "full",
    ),
    "a factor of each query": (
        lambda s, q, k, v, m: (q @ k.mT * torch.arange(ROWS)[:, None].log1p()).softmax(-1) @ v,
        "full",
    ),
    "a factor of each key": (
        lambda s, q, k, v, m: (q @ k.mT * torch.arange(ROWS).log1p()).softmax(-1) @ v,
        "score((score * float64(log1p(k))))",
    ),
    "softcap": (lambda s, q, k, v, m: (torch.tanh(q @ k.mT * SCALE / 5) * 5).softmax(-1) @ v, "softcap(5)"),
    "softcap, learned": (
        lambda s, q, k, v, m: (torch.tanh(q @ k.mT / 5) * s.temperature).softmax(-1) @ v,
        "score((tanh(score) * temperature[h, 0, 0]))",
    ),
    "softcap of what was masked": (
        lambda s, q, k, v, m: (torch.tanh((q @ k.mT).masked_fill(away() > 0, -math.inf) / 5) * 5).softmax(-1) @ v,
        "score((tanh(div(where((k-q >= 1), -inf, score), 5)) * 5))",
    ),
    "two functions of the score": (
        lambda s, q, k, v, m: torch.where(padding(m), torch.tanh(q @ k.mT), q @ k.mT * 0.3).softmax(-1) @ v,
        "score",
    ),
    "a learned bias": (relative_bias, "bias(learned: table)"),
    "taken from a bias": (
        lambda s, q, k, v, m: (s.table[away() + ROWS].permute(2, 0, 1) - q @ k.mT).softmax(-1) @ v,
        "bias(learned: table)",
    ),
    "a synonym": (lambda s, q, k, v, m: torch.special.softmax(torch.linalg.matmul(q, k.mT), -1) @ v, "full"),
    "negative": (lambda s, q, k, v, m: (s.triangle.log() - q @ k.mT).softmax(-1) @ v, "causal"),
    "taken from a function of the key, and that from another": (
        lambda s, q, k, v, m: (q.sum(-1, True) - 2 * (k.square().sum(-1)[:, :, None] - q @ k.mT)).softmax(-1) @ v,
        "bias(learned: sum_1, sum_2)",
    ),
    "keys of relative places": (relative_keys, "bias(learned: einsum)"),
    "places of queries and of keys": (places_of_both, "bias(learned: matmul_1, matmul_2)"),
    "shifted rows": (shifted_places, "bias(learned: matmul_1)"),
    "sinks": (sinks, "causal & sinks"),
    "sinks in front": (sinks_in_front, "sinks"),
    "padding": (lambda s, q, k, v, m: filled(q @ k.mT, m, -math.inf).softmax(-1) @ v, "padding(m)"),
    "padding, finite": (
        lambda s, q, k, v, m: filled(q @ k.mT, m, LOWEST).softmax(-1) @ v,
        "bias(m) & filled(padding(m))",
    ),
    "padding, a small number": (
        lambda s, q, k, v, m: filled(q @ k.mT, m, -5.0).softmax(-1) @ v,
        "bias(m) & filled(padding(m))",
    ),
    "padding, added": (lambda s, q, k, v, m: (q @ k.mT + padding(m) * -1e4).softmax(-1) @ v, "bias(m)"),
    "bounded below": (
        lambda s, q, k, v, m: (
            torch.maximum(q @ k.mT + padding(m) * -1e29, torch.tensor(-1e30).double()).softmax(-1) @ v
        ),
        "bias(m)",
    ),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCORES)
def test_what_is_done_to_scores(name):
    core, pattern = SCORES[name]
    verdict = validate(2, Model(core), *given())
    (site,) = verdict.report.sites
    assert (site.form, site.pattern, site.refusal) == ("unfused", pattern, None)
    assert verdict.wrong == ""
    whole = [node for node in verdict.graph.graph.nodes if node.op == "call_function" and is_tensor(node)]
    assert [node for node in whole if shape_of(node).count(ROWS) > 1] == []  # no rank holds a number for every pair


@pytest.mark.parametrize("value, p", [(LOWEST, 3), (-1e9, 2), (-1e4, 3)])
def test_rows_that_see_nothing_but_finite_fills(value, p):
    """All their weights are equal, and no gradient reaches their scores."""
    x, m = given()
    m[0] = 0
    assert validate(p, Model(lambda s, q, k, v, m: filled(q @ k.mT, m, value).softmax(-1) @ v), x, m).wrong == ""


def test_rows_that_see_nothing_but_a_bound():
    model = Model(
        lambda s, q, k, v, m: (q @ k.mT + filled(q.new_zeros(ROWS), m, -math.inf)).clamp(LOWEST).softmax(-1) @ v
    )
    assert validate(2, model, given()[0], given()[1] * 0).wrong == ""


def relative(s):
    return s.table[away() + ROWS].permute(2, 0, 1)[None]


BLIND = {
    "filled": lambda s, q, k, v, m: filled(q @ k.mT, m, -math.inf).softmax(-1) @ v,
    "filled, then scaled": lambda s, q, k, v, m: (filled(q @ k.mT, m, -math.inf) * 0.3).softmax(-1) @ v,
    "filled, a learned bias within": lambda s, q, k, v, m: filled(q @ k.mT + relative(s), m, -math.inf).softmax(-1) @ v,
    "added": lambda s, q, k, v, m: (q @ k.mT + filled(q.new_zeros(ROWS), m, -math.inf)).softmax(-1) @ v,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", BLIND)
@pytest.mark.parametrize("p", (1, 2, 3))
def test_rows_that_see_nothing_are_nan_as_softmax_has_it(name, p):
    """Of scores that were filled no gradient reaches queries and keys; of those that a mask was added to, NaN does."""
    x, m = given()
    m[0] = 0
    verdict = validate(p, Model(BLIND[name]), x, m)
    assert verdict.wrong == ""
    for (out, *_), _gradients in verdict.found:
        assert out[0].isnan().all() and not out[1].isnan().any()


# ---- what is done to weights -----------------------------------------------------------------------------------------
WEIGHTS = {
    "a factor of each head": lambda s, w, v, m: (w * s.temperature) @ v,
    "a factor of each key": lambda s, w, v, m: (w * m[:, None, None]) @ v,
    "0 for nan": lambda s, w, v, m: w.nan_to_num() @ v,
    "0 for nan, spelled out": lambda s, w, v, m: torch.where(w.isnan(), 0.0, w) @ v,
    "0 where the scores were hidden": lambda s, w, v, m: filled(w, m, 0.0) @ v,
    "multiply and sum": lambda s, w, v, m: (w[..., None] * v[:, :, None]).sum(-2),
    "the other way round": lambda s, w, v, m: (v.mT @ w.mT).mT,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("fill", (-math.inf, -1e9))
def test_what_is_done_to_weights(name, fill):
    def core(s, q, k, v, m):
        return WEIGHTS[name](s, filled(q @ k.mT, m, fill).softmax(-1), v, m)

    x, m = given()
    if name.startswith("0 where"):
        m[0] = 0  # such rows are 0, whatever the fill
    verdict = validate(2, Model(core), x, m)
    assert [site.refusal for site in verdict.report.sites] == [None] and verdict.wrong == ""


def both_ways(m):
    """Of queries and of keys that are padding."""
    return ~((m[:, None, :, None] > 0) & (m[:, None, None] > 0))


ZEROED = {
    # Conformers of NVIDIA NeMo (MultiHeadAttention.forward_attention), whose fill of -1e4 hides nothing by itself
    "queries and keys": lambda s, a, v, m, fill: (
        a.masked_fill(both_ways(m), fill).softmax(-1).masked_fill(both_ways(m), 0.0) @ v
    ),
    "keys, of causal attention": lambda s, a, v, m, fill: (
        filled(a.masked_fill(away() > 0, fill).softmax(-1), m, 0.0) @ v
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ZEROED)
@pytest.mark.parametrize("fill", (-1e9, -1e4, -1.0))
def test_weights_of_whole_rows_and_keys_are_put_to_0_by_factors(name, fill):
    x, m = given()
    m[0] = 0
    verdict = validate(2, Model(lambda s, q, k, v, m: ZEROED[name](s, q @ k.mT, v, m, fill)), x, m)
    assert [site.refusal for site in verdict.report.sites] == [None] and verdict.wrong == ""


def test_returned_weights_are_computed_beside():
    class Both(Model):
        def forward(self, x, m):
            weights = []

            def core(s, q, k, v, m):
                weights.append((q @ k.mT).softmax(-1))
                return weights[0] @ v

            self.core = core
            return super().forward(x, m), weights[0].mean(1)

    verdict = validate(2, Both(None), *given())
    assert [site.form for site in verdict.report.sites] == ["unfused"] and verdict.wrong == ""


def test_the_diff():
    class Program(nn.Module):
        def forward(self, q, k, v):
            scores = (q @ k.transpose(1, 2)) / 8
            return F.dropout(scores.masked_fill(away() > 0, -1e9).softmax(-1), 0.1) @ v

    inputs = [torch.randn(BATCH, ROWS, DEPTH, requires_grad=True) for _ in range(3)]
    before, _ = after([Normalize()], Program(), *inputs)
    now, _ = after([Normalize(), FindSoftmax(), FindUnfused()], Program(), *inputs)
    assert_expected_inline(
        changes(short(before.graph), short(now.graph)),
        """\
  %k = input
  %q = input
  %v = input
+ %reshape = reshape(%q, [2, 1, 13, 8])
+ %reshape_1 = reshape(%k, [2, 1, 13, 8])
+ %reshape_2 = reshape(%v, [2, 1, 13, 8])
+ %seeds = seeds(1, device(type='cpu'))
+ %select = select(%seeds, 0, 0)
+ %attention = attention(%reshape, %reshape_1, %reshape_2, None, [], None, %select, 'causal', '', 0.1, 0.125)
+ %reshape_3 = reshape(%attention, [2, 13, 8])
+ return [%reshape_3]
- %transpose = transpose(%k, 1, 2)
- %matmul = matmul(%q, %transpose)
- %div = div(%matmul, 8)
- %arange = arange(13, device=device(type='cpu'), pin_memory=False)
- %unsqueeze = unsqueeze(%arange, 0)
- %arange_1 = arange(13, device=device(type='cpu'), pin_memory=False)
- %unsqueeze_1 = unsqueeze(%arange_1, 1)
- %sub = sub(%unsqueeze, %unsqueeze_1)
- %gt = gt(%sub, 0)
- %masked_fill = masked_fill(%div, %gt, -1e+09)
- %softmax = softmax(%masked_fill, -1)
- %dropout = dropout(%softmax, 0.1, True)
- %matmul_1 = matmul(%dropout, %v)
- return [%matmul_1]""",
    )
