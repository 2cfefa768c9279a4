"""Extremes, statistics and normalisation over a sharded sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate, validate_module
from tests.sharding.programs import D, Model, case, check, inputs


def tied(x):
    """Few different values, so that the largest comes several times, on several ranks."""
    return (x * 1.5).round() / 2 + 0 * x


def dead(x):
    """A column that is hidden whole, and some of another."""
    columns = torch.arange(x.shape[2])
    return (columns == 1) | ((columns == 2) & (x > 0))


def one_of(pair, index):
    return lambda m, x: m.linear(x) * pair(x)[index].unsqueeze(1)


STEPS = {
    "amax": lambda m, x: x - x.amax(1, keepdim=True),
    "amax over ties": lambda m, x: x.relu().amax(1, keepdim=True) * x,
    "amin of two dims": lambda m, x: x * x.relu().amin((1, 2))[:, None, None],
    "max of all": lambda m, x: x / x.abs().max(),
    "min of all": lambda m, x: x * x.min(),
    "max along": lambda m, x: x * x.max(1, keepdim=True)[0],
    "max along, ties": lambda m, x: x + x.relu().max(1)[0].unsqueeze(1),
    "index of the first largest": lambda m, x: x * x.relu().max(1)[1].unsqueeze(1),
    "min along": lambda m, x: x * x.relu().min(1, keepdim=True).values,
    "argmax": lambda m, x: x * tied(x).argmax(1, keepdim=True),
    "argmin": lambda m, x: x * tied(x).argmin(1).unsqueeze(1),
    "max along channels": lambda m, x: x * x.max(-1, keepdim=True)[0],
    "larger of two": lambda m, x: torch.max(x, m.linear(x)),
    "any": lambda m, x: x * (x > 1.5).any(1, keepdim=True),
    "all": lambda m, x: x * (x > -9).all(1)[:, None],
    "any of all": lambda m, x: x * (x > 1.5).any(),
    "softmax": lambda m, x: x.softmax(1) * x,
    "softmax of large scores": lambda m, x: (x * 300).softmax(1),
    "softmax of masked scores": lambda m, x: x * x.masked_fill(x == x.amax(1, keepdim=True), -torch.inf).softmax(1),
    "safe softmax of columns": lambda m, x: x * torch.ops.aten._safe_softmax(x.masked_fill(dead(x), -torch.inf), 1),
    "_softmax": lambda m, x: torch.ops.aten._softmax(x, 1, False) * x,
    "_log_softmax": lambda m, x: torch.ops.aten._log_softmax(x, 1, False),
    "log_softmax": lambda m, x: x.log_softmax(1),
    "attention pooling": lambda m, x: x + (m.linear(x)[..., :1].softmax(1) * x).sum(1, keepdim=True),
    "logsumexp": lambda m, x: x * x.logsumexp(1, keepdim=True),
    "logsumexp of two dims": lambda m, x: x * (x * 200).logsumexp((1, 2))[:, None, None],
    "logsumexp of masked scores": lambda m, x: x * x.masked_fill(x > -2, -torch.inf).logsumexp(1).exp()[:, None],
    "var": lambda m, x: x / (1 + x.var(1, keepdim=True)),
    "var far from 0": lambda m, x: x * (x + 1e6).var(1, unbiased=False)[:, None],
    "std": lambda m, x: x / x.std((1, 2), correction=0)[:, None, None],
    "std of a constant": lambda m, x: x + (x * 0 + m.vector).std(1, keepdim=True),
    "var of all": lambda m, x: x * x.var(),
    "var_mean": lambda m, x: (x - torch.var_mean(x, 1, keepdim=True)[1]) * torch.var_mean(x, 1, keepdim=True)[0],
    "std_mean": lambda m, x: x * torch.std_mean(x, 1, keepdim=True)[0],
    "norm": lambda m, x: F.normalize(x, dim=1),
    "norm of order 1": lambda m, x: F.normalize(x, p=1, dim=1),
    "norm of infinite order": lambda m, x: x / torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True),
    "norm of zeros": lambda m, x: x + (x * 0).norm(dim=1, keepdim=True),
    "norm of all": lambda m, x: x / x.norm(),
}


T = lambda x: x.transpose(1, 2)  # noqa: E731


class Layers(nn.Module):
    """A layer over [B, D, N] or [B, N, D], used twice, between attentions."""

    def __init__(self, layer, channels_first=True):
        super().__init__()
        self.model, self.layer, self.channels_first = Model(), layer, channels_first

    def forward(self, x, ids):
        for _ in range(2):
            x = self.model.attention(x)
            x = T(self.layer(T(x))) if self.channels_first else self.layer(x)
        return self.model.attention(x)


def randomized(layer):
    """Weights and statistics that are not 0 and 1."""
    for value in [*layer.parameters(), *layer.buffers()]:
        if value.is_floating_point():
            value.data = torch.rand_like(value) + 0.5
    return layer


LAYERS = {
    "batch norm": lambda: nn.BatchNorm1d(D),
    "batch norm, fast": lambda: nn.BatchNorm1d(D, momentum=0.7),
    "batch norm without statistics": lambda: nn.BatchNorm1d(D, track_running_stats=False),
    "batch norm without weights": lambda: nn.BatchNorm1d(D, affine=False),
    "batch norm in evaluation": lambda: nn.BatchNorm1d(D).eval(),
    "group norm": lambda: nn.GroupNorm(2, D),
    "group norm without weights": lambda: nn.GroupNorm(4, D, affine=False),
    "instance norm": lambda: nn.InstanceNorm1d(D),
    "instance norm with weights": lambda: nn.InstanceNorm1d(D, affine=True),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    p, layout = case(LAYERS, name)
    torch.manual_seed(0)
    verdict = validate_module(p, Layers(randomized(LAYERS[name]())).double(), *inputs(13), layout=layout)
    assert not verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.parametrize("p, layout", [(2, "zigzag"), (3, "contiguous")])
def test_layer_norm_over_the_sequence(p, layout):
    torch.manual_seed(0)
    module = Layers(randomized(nn.LayerNorm((13, D))), channels_first=False)
    verdict = validate_module(p, module.double(), *inputs(13), layout=layout)
    assert not verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_instance_norm_with_running_statistics_is_gathered():
    torch.manual_seed(0)
    verdict = validate_module(2, Layers(nn.InstanceNorm1d(D, track_running_stats=True)).double(), *inputs(13))
    assert not verdict.wrong
    assert [gather.op for gather in verdict.report.gathers] == ["instance_norm", "instance_norm", "output"]


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    p, layout = case(STEPS, name)
    verdict = check(STEPS[name], p=p, layout=layout, n=13)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_the_largest_of_a_column_of_pairs_is_cut_like_any_value():
    """It is on every rank, an element of a pair that a handler placed, and wanted in rows."""
    verdict = check(lambda m, x: x * (x @ T(x)).max(1)[0][..., None], p=3, n=13)
    assert [gather.op for gather in verdict.report.gathers] == ["matmul", "output"]


def test_elements_of_an_operator_taken_apart_are_its_parts():
    """Of broadcast_tensors: nothing of it is scattered, nor computed whole."""
    places = lambda x: torch.arange(x.shape[1], dtype=x.dtype).sin()  # noqa: E731
    verdict = check(lambda m, x: x * torch.broadcast_tensors(x[..., 0], places(x))[1][..., None], p=3, n=13)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ("amax over ties", "max along, ties", "softmax", "var", "argmax"))
def test_on_four_ranks(name):
    verdict = check(STEPS[name], p=4, layout="zigzag", n=11)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.parametrize(
    "step, op",
    [
        (lambda m, x: x * x.prod(), "prod"),
        (lambda m, x: x * x.median(), "median"),
        (lambda m, x: x * torch.linalg.vector_norm(x, 3), "linalg_vector_norm"),
        (lambda m, x: x * x.argmax(), "argmax"),
    ],
)
def test_what_is_not_known_is_gathered(step, op):
    verdict = check(step)
    assert [gather.op for gather in verdict.report.gathers] == [op, "output"]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ("amax", "softmax", "logsumexp", "var", "norm", "cumsum", "mean"))
def test_sixteen_bits_are_computed_in_float32(name):
    """Large sums too: to the rounding of the result."""
    step = {**STEPS, "cumsum": lambda m, x: x.cumsum(1), "mean": lambda m, x: x - x.mean(1, keepdim=True)}[name]
    torch.manual_seed(0)
    module = Model(lambda m, x: step(m, (x * 4).round()), lambda m, x: x).bfloat16()
    x, ids = inputs(13)
    verdict = validate(3, module, x.detach().bfloat16(), ids, tolerance=0.03, layout="contiguous")
    assert not verdict.wrong
