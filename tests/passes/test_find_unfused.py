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
from ringopt.passes import UNDERSTAND
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
    "two functions of the score": (
        lambda s, q, k, v, m: torch.where(padding(m), torch.tanh(q @ k.mT), q @ k.mT * 0.3).softmax(-1) @ v,
        "score",
    ),
    "a learned bias": (relative_bias, "bias(learned: table)"),
    "taken from a bias": (
        lambda s, q, k, v, m: (s.table[away() + ROWS].permute(2, 0, 1) - q @ k.mT).softmax(-1) @ v,
        "bias(learned: table)",
    ),
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


# ---- shapes ----------------------------------------------------------------------------------------------------------
def places():
    return torch.arange(ROWS, dtype=torch.float64)[:, None] * torch.linspace(0, 1, DEPTH, dtype=torch.float64)


SHAPES = {
    "fewer queries": lambda s, q, k, v, m: (q[:, :, :7] @ k.mT).softmax(-1) @ v,
    "keys and queries exchanged": lambda s, q, k, v, m: (k @ q.mT).softmax(-2).mT @ v,
    "one head at a time": lambda s, q, k, v, m: torch.stack(
        [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)], 1
    ),
    "one KV head": lambda s, q, k, v, m: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "one KV head, three dims": lambda s, q, k, v, m: torch.einsum(
        "bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).softmax(-1), v[:, 0]
    ),
    "batch and heads as one": lambda s, q, k, v, m: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).view(BATCH, HEADS, ROWS, DEPTH),
    "the keys of each head alone": lambda s, q, k, v, m: (q[:, :1] @ k.mT).softmax(-1) @ v,
    "tokens that a layer has mixed": lambda s, q, k, v, m: (q @ (k + s.mixer(k.mT).mT).mT).softmax(-1) @ v,
    "keys that are places": lambda s, q, k, v, m: (q @ places().mT).softmax(-1) @ v,
    "values that are places": lambda s, q, k, v, m: (q @ k.mT).softmax(-1) @ places(),
    "an equation without its result": lambda s, q, k, v, m: torch.einsum(
        "...ij,...jk", torch.einsum("...ij,...kj", q, k).softmax(-1), v
    ),
    "products squeezed together": lambda s, q, k, v, m: torch.einsum(
        "...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    verdict = validate(2, Model(SHAPES[name]), *given())
    sites = verdict.report.sites
    assert len(sites) == (HEADS if "at a time" in name else 1) and verdict.wrong == ""
    assert {site.refusal for site in sites} == {None}


class Plain(nn.Module):
    """`core` of q, k and v [S, D], of one sequence: products that have no batch."""

    def __init__(self, core):
        super().__init__()
        torch.manual_seed(0)
        self.core, self.qkv = core, nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.core(*self.qkv(x).chunk(3, -1))


ZERO = torch.zeros((), dtype=torch.float64)


def products(q, k):
    return torch.tensordot(q, k, ([-1], [-1]))


ONE_SEQUENCE = {
    "tensordot": lambda q, k, v: torch.tensordot(products(q, k).softmax(-1), v, 1),
    "tensordot with a mask": lambda q, k, v: torch.tensordot(
        products(q, k).masked_fill(away() > 0, -math.inf).softmax(-1), v, ([1], [0])
    ),
    "tensordot, keys first": lambda q, k, v: torch.tensordot(v, products(k, q).softmax(0), ([0], [0])).T,
    "tensordot over two dims": lambda q, k, v: torch.tensordot(
        torch.tensordot(q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1)), ([1, 2], [1, 2])).softmax(-1), v, 1
    ),
    "tensordot of heads": lambda q, k, v: torch.tensordot(
        products(q.unflatten(1, (HEADS, -1)), k[:, :DEPTH]).softmax(-1), v[:, :DEPTH], ([2], [0])
    ).flatten(1),
    "inner": lambda q, k, v: torch.inner(torch.inner(q, k).softmax(-1), v.T),
    "linalg.matmul": lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.T).softmax(-1), v),
    "addmm": lambda q, k, v: torch.addmm(
        ZERO, torch.addmm(ZERO.expand(ROWS, ROWS).masked_fill(away() > 0, -1e9), q, k.T).softmax(-1), v
    ),
}


@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(ONE_SEQUENCE)])
def test_products_without_a_batch(name, p):
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    verdict = validate(p, Plain(ONE_SEQUENCE[name]), x)
    (site,) = verdict.report.sites
    assert verdict.wrong == "" and site.refusal is None and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


# ---- look-alikes, and what is known to be attention but cannot be rewritten ------------------------------------------
def channels(s, q, k, v, m):
    return ((q.mT @ k).softmax(-1) @ v.mT).mT


def talking(s, q, k, v, m):
    return torch.einsum("bhqk,hg->bgqk", q @ k.mT, s.mix).softmax(-1) @ v


LEFT_ALONE = {
    "channels": (channels, "the softmax runs over features: channel attention, not over a sequence"),
    "queries": (
        lambda s, q, k, v, m: (q @ k.mT).softmax(-2) @ v,
        "softmax [2, 3, 13, 13]: over dim -2: the values are summed over other axes than the softmax normalises",
    ),
    "talking heads": (talking, "no axis of queries: the scores are mixed by a parameter"),
    "a router": (
        lambda s, q, k, v, m: (q @ s.places.t()).softmax(-1) @ s.places,
        "its keys or values are parameters: a router or a memory, not a sequence",
    ),
    "a constant": (
        lambda s, q, k, v, m: (q @ places()[:8].mT).softmax(-1) @ places()[:8],
        "its keys are constants of the program: a router or a memory, not a sequence",
    ),
    "weights used elsewhere": (
        lambda s, q, k, v, m: (w := (q @ k.mT).softmax(-1)) @ v + w.mean(),
        "its weights are used elsewhere too, by mean",
    ),
    "an epsilon in the sum": (
        lambda s, q, k, v, m: (
            (e := ((a := q @ k.mT) - a.amax(-1, keepdim=True)).exp()) / (e.sum(-1, keepdim=True) + 1e-3) @ v
        ),
        "exp [2, 3, 13, 13]: its rows are not divided by their plain sum, so they are no softmax",
    ),
    "classes": (lambda s, q, k, v, m: v * q.softmax(-1), "what it normalises is no product of two activations"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name):
    core, sentence = LEFT_ALONE[name]
    _, context = after(UNDERSTAND, Model(core), *given())
    assert not context.sites
    (left,) = context.left_alone
    assert left.sentence.endswith(sentence)


class Experts(nn.Module):
    """Tokens go to eight experts by how near they are to their centres, which are a buffer; then they attend."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.randn(8, DEPTH, dtype=torch.float64))
        self.experts = nn.Parameter(torch.randn(8, DEPTH, DEPTH, dtype=torch.float64))

    def forward(self, x):
        weights = (x @ F.normalize(self.centres, dim=-1).T).softmax(-1)
        x = torch.einsum("bne,bnef->bnf", weights, torch.einsum("bnd,edf->bnef", x, self.experts))
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)


@pytest.mark.parametrize("p", [2, 3])
def test_experts_by_the_centres_in_a_buffer(p):
    torch.manual_seed(0)
    verdict = validate(p, Experts(), torch.randn(BATCH, ROWS, DEPTH, dtype=torch.float64, requires_grad=True))
    (left,), report = verdict.report.left_alone, verdict.report
    assert verdict.wrong == "" and "its keys are constants of the program" in left
    assert len(report.sites) == 1 and report.sharded_fraction == 1.0
    assert [gather.op for gather in report.gathers] == ["output"]


REFUSED = {
    "the largest only": (
        lambda s, q, k, v, m: (
            (a := q @ k.mT).masked_fill(a < a.topk(3, -1).values[..., -1:], -math.inf).softmax(-1) @ v
        ),
        "the mask is made of the scores themselves, by topk",
    ),
    "weights of two": (
        lambda s, q, k, v, m: ((q @ k.mT).softmax(-1) - 0.3 * (k @ q.mT).softmax(-1)) @ v,
        "the weights are changed after the softmax, by more than a factor of whole rows or keys",
    ),
    "hidden twice": (
        lambda s, q, k, v, m: filled(q @ k.mT, m, -1e9).softmax(-1).masked_fill(away() > 0, 0.0) @ v,
        "the weights are put to 0 under another mask than that of the scores",
    ),
    "two more columns": (
        lambda s, q, k, v, m: F.pad(q @ k.mT, (0, 2)).softmax(-1)[..., :-2] @ v,
        "2 extra logits beside the keys; one is understood",
    ),
    "one more column, from which nothing is taken": (
        lambda s, q, k, v, m: F.pad((a := q @ k.mT) - a.amax(-1, True), (0, 1)).softmax(-1)[..., :-1] @ v,
        "what is taken off all scores of a row is not taken off the extra logit beside them",
    ),
    "another number than 0 for nan": (
        lambda s, q, k, v, m: filled(q @ k.mT, m, -math.inf).softmax(-1).nan_to_num(0.5) @ v,
        "the weights are changed after the softmax, by more than a factor of whole rows or keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    core, sentence = REFUSED[name]
    verdict = validate(2, Model(core), *given())
    assert {site.refusal for site in verdict.report.sites} == {sentence} and verdict.wrong == ""


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
