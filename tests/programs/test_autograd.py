"""What programs do with gradients and with state, one test each; regions of a program that torch keeps as such."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.models import difference, run
from tests.harness.translation import validate

WIDTH, HEADS = 16, 2


class Model(nn.Module):
    """Attention between two steps `step(self, value)`."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.step = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), step
        self.norm, self.gain = nn.BatchNorm1d(WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        x = self.step(self, x * 2)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(self.step(self, y))


def without_gradient(model, x):
    with torch.no_grad():
        scale = (x * model.gain).mean(1, keepdim=True)
    return x * scale + model.gain


def running(model, x):
    model.average.lerp_(x.detach().mean((0, 1)), 0.25)
    model.calls += 1
    return x - model.average


def tied(model, x):
    return F.linear(F.linear(x, model.out.weight), model.out.weight.T)


@torch.compiler.nested_compile_region
def nested(x, gain):
    return (x * gain).sin()


class Normed(Model):
    """With the step after the attention only."""

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.step(self, F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


STEPS = {
    "no_grad": without_gradient,
    "detach": lambda model, x: x * (x * model.gain).detach().sigmoid(),
    "used twice": lambda model, x: x + x.tanh() * x.sum(1, keepdim=True),
    "running average": running,
    "tied": tied,
}


def normed(model, x):
    return model.norm(x.transpose(1, 2)).transpose(1, 2)


ON_RANKS = {
    "nested region": lambda model, x: nested(nested(x, model.gain), model.gain),
}


def data(n=11, dtype=torch.float64):
    return torch.randn(2, n, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STEPS)
def test_one_step(name):
    """Outputs, buffers, and all gradients, that of the input included."""
    verdict = validate(2 + list(STEPS).index(name) % 2, Model(STEPS[name]).double(), data())
    assert not verdict.wrong
    assert verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def test_frozen_parameters_and_an_input_without_gradient():
    model = Model(STEPS["tied"]).double()
    model.qkv.requires_grad_(False)
    verdict = validate(2, model, data().detach())
    assert not verdict.wrong
    _outputs, gradients = verdict.found[0]
    assert [gradient is not None for gradient in gradients].count(True) == 2  # of the tied weight and its bias


# ---- on ranks ------------------------------------------------------------------------------------------------------
def with_state(name):
    """The error of outputs, gradients and buffers, after two calls."""
    torch._dynamo.reset()
    found = []
    for compile in (True, False):
        model = Model(ON_RANKS[name]) if name in ON_RANKS else Normed(normed)
        inputs = {"x": data(dtype=torch.float32)}
        call = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"}) if compile else model
        values = [*run(call, model, inputs), *run(call, model, inputs)]
        found.append(values + [x.float() for x in model.buffers()])
    report = ringopt.reports()[-1]
    return difference(*found), report.refusal, report.sharded_fraction


@pytest.mark.parametrize("name", [*(pytest.param(x, marks=pytest.mark.zoo) for x in ON_RANKS), "batch norm"])
def test_two_calls(ranks, name):
    for error, refusal, sharded in ranks(2, with_state, name):
        assert error < 1e-4 and refusal is None and sharded == 1.0


def dropped():
    """Three calls, the last from another seed. The mask of `gain` is replicated, that of the rows is not."""
    torch._dynamo.reset()
    model = Model(lambda model, x: F.dropout(x, 0.5) * F.dropout(model.gain, 0.5))
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        found.append(run(compiled, model, {"x": data(dtype=torch.float32)}))
    return found


def test_dropout_is_reproducible(ranks):
    for first, again, other in (both := ranks(2, dropped)):
        assert all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])
    assert all(map(torch.equal, both[0][0], both[1][0])), "the ranks return the same"


def scaled():
    """float16 with a GradScaler: the gradients that the optimizer gets."""
    torch._dynamo.reset()
    model, x = Model(STEPS["tied"]), data(dtype=torch.float32)
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    gradients = []
    for call in (compiled, model):
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.0), torch.amp.GradScaler("cpu", init_scale=256.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = call(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
    return difference(*gradients), ringopt.reports()[-1].sharded_fraction


def test_float16_with_a_scaler(ranks):
    assert all(error < 1e-2 and sharded == 1.0 for error, sharded in ranks(2, scaled))


class LearningInPart(Model):
    """Under no_grad, but for a part: what scales is a number to it."""

    def forward(self, x):
        with torch.enable_grad():
            first = self.step(self, x)
        scale = first.mean(1, keepdim=True)
        with torch.enable_grad():
            return scale, super().forward(first * scale)


def learning_in_part(inner):
    """What has a gradient, and how far gradients are from eager's, at two lengths."""
    torch._dynamo.reset()
    model = LearningInPart(STEPS["tied"]).double()
    compiled, found = torch.compile(model, backend="ring", options={"inner_backend": inner}), []
    for length in (11, 8):
        gradients = []
        for call in (compiled, model):
            with torch.no_grad():
                scale, out = call(data(length).detach())
            gradients.append(torch.autograd.grad(out.square().sum(), [model.qkv.weight, model.out.weight]))
        found.append((scale.requires_grad, out.requires_grad, difference(*gradients) < 1e-10))
    return found, ringopt.reports()[-1].sharded_fraction


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("eager", marks=pytest.mark.zoo)])
def test_gradients_in_a_part_of_what_is_called_under_no_grad(ranks, inner):
    assert ranks(2, learning_in_part, inner) == 2 * [(2 * [(False, True, True)], 1.0)]


# ---- regions that are not written out ------------------------------------------------------------------------------
def hooked(model, x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y


def test_statistics_of_a_sharded_call_and_another_are_refused():
    report = ringopt.explain(Model(normed), data(dtype=torch.float32), world_size=2)
    assert "two calls of batch_norm update the same running statistics, and one of them" in report.refusal


def test_what_is_refused_is_named():
    report = ringopt.explain(Model(hooked), data(dtype=torch.float32), world_size=2)
    if torch.__version__ < (2, 13):  # which leaves the hook to the graph that it captures, with its gradient
        assert report.refusal is None
        return
    assert "operator register_hook is not sharded yet: what it returns (number 0 of 1) lies in" in report.refusal
