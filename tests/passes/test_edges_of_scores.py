"""What scores may do at their edges: hide whole rows, hide by little, be rounded to 16 bits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.harness.translation import validate_function

BATCH, HEADS, ROWS, DEPTH = 2, 2, 7, 4


def given(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(BATCH, HEADS, ROWS, DEPTH, dtype=dtype, requires_grad=True) for _ in range(3)]


def padding(seen):
    """[B, S], of which the second batch row sees `seen` keys."""
    m = torch.ones(BATCH, ROWS, dtype=torch.bool)
    m[1, : ROWS - seen] = False
    return m


def later():
    return torch.arange(ROWS) > torch.arange(ROWS)[:, None]


def attended(p, change, *more, dtype=torch.float64):
    """The verdict on softmax(change(q @ k.mT, *more)) @ v, and its only site."""

    def program(q, k, v, *more):
        weights = change(q @ k.mT, *more).softmax(-1, torch.promote_types(dtype, torch.float32))
        return (weights.to(dtype) @ v,)

    verdict = validate_function(p, program, [*given(dtype), *more])
    (site,) = verdict.report.sites
    return verdict, site


# ---- a function of the score that hides ------------------------------------------------------------------------------
def gated(s, m):
    return (s + torch.where(m, 0.0, -math.inf)[:, None, None]) * (1 + torch.arange(ROWS))


HIDING = {
    "infinite distances": lambda s, m: -s.masked_fill(~m[:, None, None], math.inf),
    "a threshold": lambda s, m: torch.where(s - 100 * ~m[:, None, None] < -50, -math.inf, s),
    "logarithms": lambda s, m: (s.tanh() + 2).mul(m[:, None, None]).log(),
    "a mask behind a gate of keys": gated,
}


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("p", (2, 3))
def test_rows_hidden_by_a_function_of_their_scores_are_nan(name, p):
    verdict, site = attended(p, HIDING[name], padding(0))
    assert site.refusal is None and "score" in site.pattern
    for (out, *_), _gradients in verdict.found:
        assert out[1].isnan().all() and out[0].isfinite().all()


@pytest.mark.parametrize("p", (2, 3))
def test_what_is_hidden_may_be_infinite(p):
    verdict, site = attended(p, lambda s, m: torch.where(m, s / m, -math.inf), padding(3)[:, None, None])
    assert site.refusal is None and "score(div" in site.pattern and verdict.wrong == ""
    assert all(out.isfinite().all() for (out, *_), _gradients in verdict.found)


def test_a_factor_that_is_no_number_is_made_0_with_its_weights():
    def program(q, k, v, m):
        weights = (q @ k.mT).softmax(-1) * (m / m.sum(-1, keepdim=True))[:, None, None]
        return (weights.nan_to_num() @ v,)

    verdict = validate_function(2, program, [*given(), padding(0)])
    (site,) = verdict.report.sites
    assert site.refusal and site.refusal.startswith("the weights are changed after the softmax")
    assert all(not out[1].any() and out[0].isfinite().all() for (out, *_), _gradients in verdict.found)


def test_a_fill_that_is_scaled_up_with_the_scores_hides_nothing():
    """-1 is lower than no score, whatever both are multiplied with."""
    site = attended(2, lambda s: s.div(10).masked_fill(later(), -1.0) * 1e10)[1]
    assert "filled(causal)" in site.pattern
    shifted = attended(2, lambda s: (s.div(10) + torch.where(later(), -1.0, 0.0)) / 1e-10)[1]
    assert "causal" not in shifted.pattern.split(" & ")


# ---- 16 bits ---------------------------------------------------------------------------------------------------------
def slopes(s):
    return (s / 3 + (torch.arange(ROWS) - torch.arange(ROWS)[:, None]).to(s.dtype) / 7) * 0.7


ROUNDED = {
    "full": lambda s: s * 0.3,
    "causal": lambda s: (s * 0.3).masked_fill(later(), torch.finfo(s.dtype).min),
    "causal & bias": lambda s: slopes(s).masked_fill(later(), torch.finfo(s.dtype).min),
    "causal & softcap(30)": lambda s: (30 * torch.tanh(s * 0.3 / 30)).masked_fill(later(), -math.inf),
}


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_scores_of_16_bits(name, dtype):
    """What is read of them is not rounded between two ops; that is no difference from the program's own."""
    verdict, site = attended(2, ROUNDED[name], dtype=dtype)
    assert (site.pattern, site.refusal) == (name, None)
    q, k, v = (x.detach().double() for x in given(dtype))
    exact = ROUNDED[name](q @ k.mT).softmax(-1) @ v
    for (out, *_), _gradients in verdict.found:
        assert (out - exact).abs().max() < 4 * torch.finfo(dtype).eps


# ---- gradients that are stopped --------------------------------------------------------------------------------------
STOPPED = {
    "a factor": lambda s: s * s.detach(),
    "rounded, with the gradient of what was not": lambda s: s + (s.mul(4).round() / 4 - s).detach(),
}


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.parametrize("p", (2, 3))
def test_gradients_that_are_stopped_in_a_function_of_the_score(name, p):
    verdict, site = attended(p, STOPPED[name])
    assert "detach" in site.pattern and site.refusal is None and verdict.wrong == ""


@pytest.mark.parametrize("change", [lambda s: s.detach(), lambda s: (s > 0).double()], ids=("detached", "compared"))
def test_scores_without_a_gradient_are_refused(change):
    verdict, site = attended(2, change)
    assert site.refusal == "no gradient reaches its scores" and verdict.wrong == ""


# ---- weights that are cut or padded ----------------------------------------------------------------------------------
MET = {
    "over dim -1: 5 weights meet values, of 7 keys": lambda w, v: w[..., :5] @ v[:, :, :5],
    "over dim -1: 8 weights meet values, of 7 keys": lambda w, v: F.pad(w, (0, 1)) @ F.pad(v, (0, 0, 0, 1)),
}


@pytest.mark.parametrize("sentence", MET)
def test_weights_that_are_not_those_of_all_keys_are_refused(sentence):
    verdict = validate_function(2, lambda q, k, v: (MET[sentence]((q @ k.mT).softmax(-1), v),), given())
    assert [site.refusal for site in verdict.report.sites] == [sentence] and verdict.wrong == ""
