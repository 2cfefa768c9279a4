"""Losses over a sharded sequence: the value and every gradient of the unsharded one, and no gather of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.sharding.programs import D, case, check


def labels(m, x, classes=D):
    """Class indices out of nothing; in the first third of each row they are ignored."""
    wanted = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % classes
    return wanted.masked_fill(torch.arange(x.shape[1]) < x.shape[1] // 3, -100)


def flat(x):
    return x.reshape(-1, x.shape[-1])


def weights(m):
    return m.vector.abs().detach()


def entropy(**options):
    """Over flat tokens."""
    return lambda m, x: F.cross_entropy(flat(x), labels(m, x).reshape(-1), **options)


def likelihood(**options):
    return lambda m, x: F.nll_loss(flat(x).log_softmax(-1), labels(m, x).reshape(-1), **options)


def shifted(m, x, **options):
    return F.cross_entropy(flat(x[:, :-1]), labels(m, x)[:, 1:].reshape(-1), **options)


def chances(x):
    return (2 * x.detach()).softmax(-1)


CLASSES = {
    "mean": entropy(),
    "sum": entropy(reduction="sum"),
    "none": lambda m, x: entropy(reduction="none")(m, x).square().sum(),
    "smoothing": entropy(label_smoothing=0.2),
    "another index is ignored": lambda m, x: F.cross_entropy(
        flat(x), labels(m, x).clamp(0).reshape(-1), ignore_index=0
    ),
    "class dim second": lambda m, x: F.cross_entropy(x.transpose(1, 2), labels(m, x)),
    "class dim second, none": lambda m, x: F.cross_entropy(x.transpose(1, 2), labels(m, x), reduction="none").sum(),
    "weights": lambda m, x: entropy(weight=weights(m))(m, x),
    "weights and smoothing": lambda m, x: entropy(weight=weights(m), label_smoothing=0.2)(m, x),
    "probabilities": lambda m, x: F.cross_entropy(flat(x), flat(chances(x))),
    "probabilities, weights, smoothing": lambda m, x: F.cross_entropy(
        flat(x), flat(chances(x)), weight=weights(m), label_smoothing=0.1
    ),
    "probabilities, class dim second": lambda m, x: F.cross_entropy(x.transpose(1, 2), chances(x).transpose(1, 2)),
    "probabilities, none": lambda m, x: F.cross_entropy(flat(x), flat(chances(x)), reduction="none").square().sum(),
    "likelihood": likelihood(),
    "likelihood, sum": likelihood(reduction="sum"),
    "likelihood, weights": lambda m, x: likelihood(weight=weights(m))(m, x),
    "likelihood, class dim second": lambda m, x: F.nll_loss(x.log_softmax(-1).transpose(1, 2), labels(m, x)),
    "shift by slice": shifted,
    "shift by slice, sum": lambda m, x: shifted(m, x, reduction="sum"),
    "shift by slice, views": lambda m, x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, D), labels(m, x)[..., 1:].contiguous().view(-1)
    ),
    "shift by slice, class dim second": lambda m, x: F.cross_entropy(x[:, :-1].transpose(1, 2), labels(m, x)[:, 1:]),
    "shift by two": lambda m, x: F.cross_entropy(flat(x[:, :-2]), labels(m, x)[:, 2:].reshape(-1)),
    "shift by pad": lambda m, x: F.cross_entropy(flat(x), F.pad(labels(m, x), (0, 1), value=-100)[:, 1:].reshape(-1)),
    "masked by hand": lambda m, x: (
        (F.cross_entropy(flat(x), labels(m, x).clamp(0).reshape(-1), reduction="none") * (labels(m, x) > 0).reshape(-1))
        .sum() / (labels(m, x) > 0).sum()
    ),
    "log-probabilities gathered": lambda m, x: -x.log_softmax(-1).gather(2, labels(m, x).clamp(0)[..., None]).mean(),
}  # fmt: skip

ELEMENTS = {
    "mse": lambda m, x: F.mse_loss(x, torch.ones_like(x)),
    "mse, sum": lambda m, x: F.mse_loss(x, x.detach() * 2, reduction="sum"),
    "mse, none": lambda m, x: F.mse_loss(x, x.detach() * 2, reduction="none").square().sum(),
    "mse against one row": lambda m, x: F.mse_loss(x, m.vector.expand_as(x)),
    "l1": lambda m, x: F.l1_loss(x, m.linear(x)),
    "smooth l1": lambda m, x: F.smooth_l1_loss(x, m.linear(x), beta=0.3),
    "huber": lambda m, x: F.huber_loss(x, m.linear(x), delta=0.4),
    "bce": lambda m, x: F.binary_cross_entropy(x.sigmoid(), chances(x)),
    "bce, weight": lambda m, x: F.binary_cross_entropy(x.sigmoid(), chances(x), weight=weights(m)),
    "bce with logits": lambda m, x: F.binary_cross_entropy_with_logits(
        x, chances(x), weight=weights(m), pos_weight=weights(m) + 1
    ),
    "kl, batchmean": lambda m, x: F.kl_div(x.log_softmax(-1), chances(x), reduction="batchmean"),
    "kl, logarithms": lambda m, x: F.kl_div(x.log_softmax(-1), chances(x).log(), reduction="sum", log_target=True),
    "poisson": lambda m, x: F.poisson_nll_loss(x, x.detach().abs()),
    "soft margin": lambda m, x: F.soft_margin_loss(x, x.detach().sign()),
    "hinge embedding": lambda m, x: F.hinge_embedding_loss(x, (x.detach() - 0.1).sign()),
    "margin ranking": lambda m, x: F.margin_ranking_loss(x, m.linear(x), x.detach().sign(), margin=0.1),
    "triplet": lambda m, x: F.triplet_margin_loss(flat(x), flat(m.linear(x)), flat(x.flip(1))),
    "cosine": lambda m, x: F.cosine_embedding_loss(flat(x), flat(m.linear(x)), flat(x)[:, 0].detach().sign()),
    "multi margin": lambda m, x: F.multi_margin_loss(flat(x), labels(m, x).clamp(0).reshape(-1), weight=weights(m)),
    "shifted": lambda m, x: F.mse_loss(x[:, 1:], m.linear(x)[:, :-1]),
    "squares": lambda m, x: (x**2).mean(),
    "mean pooling": lambda m, x: m.linear(x.mean(1)).sum(),
    "adaptive pooling": lambda m, x: m.linear(F.adaptive_avg_pool1d(x.transpose(1, 2), 1)[..., 0]).sum(),
    "masked mean pooling": lambda m, x: (
        (x * (labels(m, x) > 0)[..., None]).sum(1) / (labels(m, x) > 0).sum(1, keepdim=True)
    ).sum(),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CLASSES)
def test_against_classes(name):
    p, layout = case(CLASSES, name)
    assert check(end=CLASSES[name], p=p, layout=layout, n=13).report.gathers == ()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", ELEMENTS)
def test_element_by_element(name):
    p, layout = case(ELEMENTS, name)
    assert check(end=ELEMENTS[name], p=p, layout=layout, n=13).report.gathers == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ("weights", "shift by slice"))
@pytest.mark.parametrize("p, layout", [(3, "contiguous"), (4, "zigzag")])
def test_on_any_number_of_ranks(name, p, layout):
    assert check(end=CLASSES[name], p=p, layout=layout, n=11).report.gathers == ()


def test_classes_that_are_tokens_are_gathered():
    verdict = check(end=lambda m, x: F.cross_entropy(x, x.detach().argmax(1)), p=3, n=11)
    assert [gather.op for gather in verdict.report.gathers] == ["cross_entropy_loss"]


def test_classes_of_one_vector_that_are_tokens_are_gathered():
    verdict = check(end=lambda m, x: F.cross_entropy(x[0, :, 0], chances(x[0, :, 0])), p=3, n=11)
    assert "cross_entropy_loss" in [gather.op for gather in verdict.report.gathers]


def test_a_loss_kept_by_token_is_gathered_as_small_as_it_is():
    verdict = check(end=lambda m, x: entropy(reduction="none")(m, x), n=13)
    assert [gather.bytes for gather in verdict.report.gathers] == [2 * 13 * 8]
