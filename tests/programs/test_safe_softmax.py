"""Attention whose rows that see nothing are 0 and not NaN: as `_safe_softmax`, as SDPA decomposes, by hand. Values and
gradients are those of the program on 2 and 3 ranks, over several lengths in one process."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.export import Dim, export
from torch.func import functional_call

import ringopt
from tests.harness.errors import worst_of
from tests.harness.lengths import run_over
from tests.harness.translation import validate, values_and_gradients

WIDTH, HEADS = 16, 4
safe_softmax = torch.ops.aten._safe_softmax


class Attention(nn.Module):
    """Causal attention with padding on the left, so that the first rows of one sequence see nothing."""

    def __init__(self, weights):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.weights = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), weights
        self.double()

    def forward(self, x, kept):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        mask = (torch.arange(n)[:, None] >= torch.arange(n)) & kept[:, None, None, :]
        y = self.weights(q @ k.mT * 0.5, mask) @ v
        return self.out(y.transpose(1, 2).flatten(2)), x.mean(1)


def given(n):
    x = torch.randn(2, n, WIDTH, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return x, torch.arange(n) >= torch.tensor([[0], [3]])


def filled(scores, mask):
    return scores.masked_fill(~mask, -math.inf)


def added(scores, mask):
    return scores + torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, -math.inf)


def zeroed(dead):
    return lambda s, m: filled(s, m).softmax(-1).masked_fill(dead(filled(s, m), m), 0.0)


WEIGHTS = {
    "safe softmax": lambda s, m: safe_softmax(filled(s, m), -1),
    "safe softmax of a sum": lambda s, m: safe_softmax(added(s, m), -1),
    "safe softmax of another dtype": lambda s, m: safe_softmax(filled(s, m).float(), 3, dtype=torch.float64),
    "all of the row is masked": zeroed(lambda s, m: ~m.any(-1, keepdim=True)),
    "all of the row is hidden": zeroed(lambda s, m: (~m).all(-1, keepdim=True)),
    "where the row sees something": lambda s, m: torch.where(m.any(-1)[..., None], filled(s, m).softmax(-1), 0.0),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_that_see_nothing_are_0(name):
    p = 2 + len(name) % 2
    reports = run_over(Attention(WEIGHTS[name]), [given(n) for n in (12, 17, 14)], p).reports
    assert [site.refusal for report in reports for site in report.sites] == [None] * len(reports)
    assert all("causal" in report.sites[0].pattern for report in reports)
    assert len(reports) == 2


def same_scores(found):
    """The same tensor is softmaxed and looked at."""

    def weights(s, m):
        s = filled(s, m)
        return found(s, s.softmax(-1))

    return weights


BY_SCORES = {
    "all": lambda s, w: w.masked_fill((s == -math.inf).all(-1, keepdim=True), 0.0),
    "any": lambda s, w: torch.where((s != -math.inf).any(-1, keepdim=True), w, 0.0),
    "not any": lambda s, w: torch.where(~(~(s == -math.inf)).any(-1)[..., None], 0.0, w),
    "isneginf": lambda s, w: w.masked_fill(s.isneginf().all(3, keepdim=True), 0.0),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("p, name", [(2, "all"), (3, "any"), (2, "not any"), (3, "isneginf")])
def test_rows_whose_scores_are_all_hidden(p, name):
    verdict = validate(p, Attention(same_scores(BY_SCORES[name])), *given(13))
    (site,) = verdict.report.sites
    assert site.refusal is None and "causal" in site.pattern and verdict.wrong == ""


NOT_SO = {
    "other rows": lambda s, m: filled(s, m).softmax(-1).masked_fill(~m.any(-1, keepdim=True).flip(2), 0.0),
    "rows with a hidden key": lambda s, m: filled(s, m).softmax(-1).masked_fill(~m.all(-1, keepdim=True), 0.0),
    "of hidden scores": same_scores(lambda s, w: w.masked_fill((s == -math.inf).any(-1, keepdim=True), 0.0)),
    "of other queries": same_scores(lambda s, w: w.masked_fill((s == -math.inf).all(-1, keepdim=True).flip(2), 0.0)),
    "over queries": same_scores(lambda s, w: w.masked_fill((s == -math.inf).all(-2, keepdim=True), 0.0)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NOT_SO)
def test_other_rows_are_zeroed(name):
    """Never as if they were those that see nothing."""
    verdict = validate(2, Attention(NOT_SO[name]), *given(13))
    assert verdict.wrong == ""
    assert all(site.refusal is not None for site in verdict.report.sites)


def of_keys(s, m):
    """Keys are zeroed that no query sees; there are as many queries as keys. Hidden are those that the query of their
    own row does not see."""
    kept, at = m[:, :, -1], torch.arange(s.shape[-1])
    seen = kept[..., (at[:, None] + at) % s.shape[-1]]
    weights = filled(s, seen[:, :, at, at][:, :, None]).softmax(-1)
    return torch.where(seen.any(-2, keepdim=True), weights, 0.0)


def test_keys_that_are_zeroed_are_no_rows():
    x, _ = given(12)
    verdict = validate(2, Attention(of_keys), x, (torch.arange(12) % 2 == 1).expand(2, -1))
    assert verdict.wrong == "" and all(out.isnan().all() for (out, *_), _gradients in verdict.found)


class Called(nn.Module):
    """One call of SDPA."""

    def __init__(self, causal):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.causal = nn.Linear(WIDTH, 3 * WIDTH).double(), causal

    def forward(self, x, kept):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = None if self.causal else kept[:, None, None, :] & torch.ones(x.shape[1], 1, dtype=torch.bool)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return y.transpose(1, 2).flatten(2).square(), kept.any(1)


def decomposed(causal, n=13, **how):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = export(Called(causal), nothing_seen(n), **how).run_decompositions()
    assert not [node for node in program.graph.nodes if "scaled_dot" in str(node.target)]
    return program


def nothing_seen(n):
    """One sequence is all padding."""
    return given(n)[0], torch.arange(n) >= torch.tensor([[0], [n]])


@pytest.mark.sample(2)
@pytest.mark.parametrize("p, causal", [(2, True), (3, False)])
def test_a_decomposed_program_is_compiled_and_explained(p, causal):
    program = decomposed(causal)
    report = ringopt.explain(program, world_size=p)
    assert [site.refusal for site in report.sites] == [None] and report.sharded_fraction > 0.99
    verdict = validate(p, program.module(), *nothing_seen(13))
    assert [site.refusal for site in verdict.report.sites] == [None]
    assert ("gradient" in verdict.wrong) == (not causal)
    # Where a row sees nothing, SDPA has the gradient 0, and the parts that it is decomposed to have NaN.
    called = Called(causal)
    expected = values_and_gradients(
        lambda x, kept, *held: of_module(called, x, kept, held), [*nothing_seen(13), *called.parameters()]
    )
    for found in verdict.found:
        assert torch.allclose(found[0][0], expected[0][0], 1e-9, 1e-12)
        by_shape = {x.shape: x for x in found[1] if x is not None}
        assert all(torch.allclose(by_shape[x.shape], x, 1e-9, 1e-12) for x in expected[1] if x is not None)


def of_module(module, x, kept, held):
    return functional_call(module, dict(zip(dict(module.named_parameters()), held, strict=True)), (x, kept))


def converted(program, lengths):
    """The largest difference from the program itself, of one process, over lengths."""
    made, apart = ringopt.convert(program).module(), 0.0
    for n in lengths:
        for found, expected in zip(made(*nothing_seen(n)), program.module()(*nothing_seen(n)), strict=True):
            apart = worst_of(apart, float((found.double() - expected.double()).abs().max()))
    return apart


@pytest.mark.zoo
def test_a_decomposed_program_is_converted(ranks):
    assert max(ranks(2, convert_here, timeout=600)) < 1e-12


def convert_here():
    program = decomposed(True, dynamic_shapes=({1: (n := Dim("n", min=8, max=99))}, {1: n}))
    return converted(program, (13, 21))
