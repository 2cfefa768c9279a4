"""What looks like attention is left alone; attention that cannot be rewritten is refused by a sentence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.passes import UNDERSTAND
from tests.harness.capturing import after
from tests.harness.translation import validate
from tests.passes.test_find_unfused import BATCH, DEPTH, ROWS, Model, away, filled, given
from tests.passes.test_unfused_shapes import places


def channels(s, q, k, v, m):
    return ((q.mT @ k).softmax(-1) @ v.mT).mT


def talking(s, q, k, v, m):
    return torch.einsum("bhqk,hg->bgqk", q @ k.mT, s.mix).softmax(-1) @ v


LEFT_ALONE = {
    "channels": (channels, "the softmax runs over features: channel attention, not over a sequence"),
    "channels, weighed by constants": (
        lambda s, q, k, v, m: ((q.mT @ (k * places())).softmax(-1) @ v.mT).mT,
        "the softmax runs over features: channel attention, not over a sequence",
    ),
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


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
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
    "scores of other keys": (
        lambda s, q, k, v, m: ((a := q @ k.mT) + a.flip(-1)).softmax(-1) @ v,
        "a score is made of other products than that of its own query and key",
    ),
    "weights of two": (
        lambda s, q, k, v, m: ((q @ k.mT).softmax(-1) * (k @ q.mT).softmax(-1)) @ v,
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
