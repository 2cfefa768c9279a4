"""Losses of the tokens that a mask picks: a sum over all tokens of what each has of it, on its own rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference, run
from tests.harness.translation import validate

D, CLASSES, ROWS, IGNORED = 8, 11, 13, -100
TRACED = pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo ends its graph in losses of picked tokens")


class Model(nn.Module):
    """Attention, and a loss of some tokens, which `loss` spells."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.qkv, self.head = loss, nn.Linear(D, 3 * D), nn.Linear(D, CLASSES)
        self.register_buffer("weight", torch.linspace(0.5, 2, CLASSES))

    def forward(self, x, labels):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.loss(self, x + F.scaled_dot_product_attention(q, k, v, is_causal=True), labels)


def of_classes(m, y, labels):
    return F.cross_entropy(m.head(y[labels != IGNORED]), labels[labels != IGNORED])


def weighed(m, y, labels):
    some = labels != IGNORED
    smooth = {"ignore_index": 3, "label_smoothing": 0.1}
    return F.cross_entropy(input=m.head(y[some]), target=labels[some], weight=m.weight, **smooth)


def of_flat(m, y, labels):
    flat, some = labels.view(-1), labels.view(-1) != IGNORED
    return F.nll_loss(m.head(y.view(-1, D)[some]).log_softmax(-1), flat[some])


def by_number(m, y, labels):
    some = (labels != IGNORED).nonzero(as_tuple=True)
    return F.cross_entropy(m.head(y[some]), labels[some], reduction="sum") / len(labels)


def shifted(m, y, labels):
    before, labels = y[:, :-1], labels[:, 1:]
    some = labels != IGNORED
    return F.cross_entropy(m.head(before[some]), labels[some], reduction="sum") / some.sum()


def distilled(m, y, labels):
    """Several of the same tokens; all their numbers count."""
    some = (labels != IGNORED)[:, :]
    student, teacher = m.head(y[some]).log_softmax(-1), m.head(y[some].detach() * 2).softmax(-1)
    divergence = (teacher * (teacher.log() - student)).sum(-1).mean()
    close = F.mse_loss(m.head(y)[some], teacher) + F.binary_cross_entropy_with_logits(m.head(y[some]), teacher)
    return divergence + close + (y[some] - 1).abs().mean() + y[some].sum() / 100


def batch(rows=ROWS, dtype=torch.float64):
    torch.manual_seed(rows)
    labels = torch.randint(0, CLASSES, (2, rows))
    labels[torch.rand(2, rows) < 0.4] = IGNORED
    labels[:, rows // 2 + 1 :] = IGNORED  # the last rank may have none
    return torch.randn(2, rows, D, dtype=dtype, requires_grad=True), labels


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.zoo)])
@pytest.mark.parametrize(
    "loss",
    [weighed, of_flat, by_number, shifted, *(pytest.param(loss, marks=TRACED) for loss in (of_classes, distilled))],
)
def test_each_rank_adds_up_its_own_tokens(loss, p):
    verdict = validate(p, Model(loss).double(), *batch())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0 and not verdict.report.gathers


@TRACED
def test_of_no_tokens_the_mean_is_what_torch_says():
    x, labels = batch()
    verdict = validate(2, Model(of_classes).double(), x, torch.full_like(labels, IGNORED))
    assert verdict.wrong == ""  # nan, and gradients of 0


@TRACED
def test_sixteen_bits_are_added_in_float32():
    verdict = validate(2, Model(of_classes).bfloat16(), *batch(dtype=torch.bfloat16), tolerance=2e-2)
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0


def read_in_between(m, y, labels):
    """What is picked next is made of the loss."""
    some = labels != IGNORED
    return (y * m.head(y[some]).mean())[some].sum()


def one_of_another(m, y, labels):
    some = labels != IGNORED
    weight = y.detach()[some].mean().sigmoid()
    return F.binary_cross_entropy_with_logits(y[some], y[some].detach().sigmoid(), pos_weight=weight)


def of_other_rows(m, y, labels):
    """What is added up has no row, or several, for each token."""
    some = (labels != IGNORED)[:, 1:]
    kept = y[:, 1:][some]
    alike = (kept @ kept.mT).mean()
    return kept.view(-1).square().mean() + kept.mT.abs().mean() + alike + kept[kept[:, 0] > 0].sum()


def written_mask(m, y, labels):
    some = labels != IGNORED
    some[:, 0] = True
    return m.head(y[some]).mean() + some.sum()


def written_through_views(m, y, labels):
    """Of one spelling two masks, and two values of what is added to the first loss."""
    labels, more = labels.clone(), torch.ones(1, dtype=y.dtype)
    first = y[labels != IGNORED].mean() + more
    labels.view(-1)[:5] = IGNORED
    more.view(1).add_(1)
    return (first + y[labels != IGNORED].sum() + more + F.mse_loss(input=y, target=y.detach() * 2)).sum()


@pytest.mark.parametrize("loss", [written_through_views, read_in_between, one_of_another, of_other_rows, written_mask])
def test_what_is_no_sum_by_token_is_as_exact(loss):
    assert validate(2, Model(loss).double(), *batch()).wrong == ""


def on_rank(loss, inner_backend):
    torch._dynamo.reset()
    model, before = Model(loss).double(), len(ringopt.reports())
    compiled, wrong = torch.compile(model, backend="ring", options={"inner_backend": inner_backend}), []
    for rows in (13, 10, 16):
        given = dict(zip(("x", "labels"), batch(rows), strict=True))
        wrong.append(difference(run(compiled, model, given), run(model, model, given)))
    return worst_of(*wrong), [(report.sharded_fraction, report.notes) for report in ringopt.reports()[before:]]


@TRACED
@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)])
def test_the_line_that_picks_may_return(ranks, inner_backend):
    """Dynamo ends the second trace, which has the sizes, on the line that ended the first."""
    for error, reports in ranks(2, on_rank, of_classes, inner_backend):
        assert error < 1e-10
        assert [share for share, _ in reports] == [1, 1, 1] and "graph break" not in str(reports)
