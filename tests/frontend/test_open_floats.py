"""Floats that change from call to call (a weight that is annealed, a temperature): one graph serves all of them."""

import math
import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference
from tests.programs.test_lengths import run_over

NUMBERS = (0.1, 0.3, 0.7, 1.9, 0.0, -2.5)


class Layer(nn.Module):
    """Attention between two uses of a number."""

    def __init__(self, use, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.use, self.qkv = use, nn.Linear(8, 24).to(dtype)

    def forward(self, x, number):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.use(F.scaled_dot_product_attention(q, k, v, is_causal=True), number)


def written(x, number):
    y = x.clone()
    y *= number
    return y.sub_(number)


def weighted_losses(x, number):
    return x.square().mean() + number * x.abs().mean() + (1 - number) * x.sum()


USES = {
    "times": operator.mul,
    "from the left": lambda x, number: number * x,
    "by torch": lambda x, number: torch.add(x, number).mul(number),
    "less": lambda x, number: number - x,
    "in its own sum": lambda x, number: x * (1 - 0.5 * number) / (number + 3),
    "losses": weighted_losses,
    "written": written,
    "temperature": lambda x, number: torch.softmax(x @ x.mT * number, -1) @ x,
}


def calls(dtype=torch.float64, numbers=NUMBERS):
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 11, 8, generator=draw).to(dtype), number) for number in numbers]


@pytest.mark.sample(4)
@pytest.mark.parametrize("use", USES)
def test_one_graph_serves_all_numbers(use):
    assert len(run_over(Layer(USES[use]), calls(), 3).reports) == 2  # the first number is a constant to Dynamo


@pytest.mark.sample(3)
@pytest.mark.parametrize("use", ["times", "in its own sum", "losses"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_are_those_of_eager(use, dtype):
    """A number is not rounded to the dtype of the tensor that it is multiplied with."""
    torch._dynamo.reset()
    layer, before = Layer(USES[use], dtype), len(ringopt.reports())
    compiled = torch.compile(layer, backend="ring", options={"inner_backend": "aot_eager"})
    with torch.no_grad():
        for x, number in calls(dtype):
            found, expected = compiled(x, number), layer(x, number)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert len(ringopt.reports()) - before == 2  # AOTAutograd has no number fixed either


def trained(inner_backend):
    """The error of outputs and gradients, and how many graphs there were."""
    torch._dynamo.reset()
    layer, before, worst = Layer(weighted_losses), len(ringopt.reports()), 0.0
    compiled = torch.compile(layer, backend="ring", options={"inner_backend": inner_backend})
    for x, number in calls():
        values = [[y := run(x, number), *torch.autograd.grad(y, list(layer.parameters()))] for run in (compiled, layer)]
        worst = worst_of(worst, difference(*values))
    return worst, len(ringopt.reports()) - before


@pytest.mark.zoo
@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.zoo)])
def test_training_with_a_weight_that_changes(ranks, inner_backend):
    assert all(error < 1e-9 and graphs == 2 for error, graphs in ranks(2, trained, inner_backend))


def test_a_number_that_an_operator_takes_is_fixed():
    """Another one compiles another graph."""
    scaled = Layer(lambda x, number: F.scaled_dot_product_attention(x, x, x, scale=number))
    assert len(run_over(scaled, calls(), 2).reports) == len(NUMBERS)
    divided = Layer(lambda x, number: x * (1 / number))  # of 0 Python makes an error
    assert len(run_over(divided, calls(numbers=(0.1, 0.3, 0.7)), 2).reports) == 3


class Tempered(nn.Module):
    """A temperature that is an attribute, beside a mask that is read while compiling."""

    def __init__(self):
        super().__init__()
        self.temperature = 1.0
        self.register_buffer("seen", torch.ones(11, 11).tril() > 0)

    def forward(self, x):
        scores = (x @ x.mT * self.temperature).masked_fill(~self.seen, float("-inf"))
        return torch.softmax(scores, -1) @ x


def test_a_number_of_the_module_is_no_buffer_of_it():
    """What is read of it while compiling would be compiled anew at every call."""
    torch._dynamo.reset()
    model, before = Tempered(), len(ringopt.reports())
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "aot_eager"})
    for x, model.temperature in calls():
        torch.testing.assert_close(compiled(x), model(x))
    assert [site.pattern for report in ringopt.reports()[before:] for site in report.sites] == ["causal"] * 2


def graphs_of(use, numbers):
    """How many graphs there were of attention whose result `use` combines with a number."""
    layer, before = Layer(use), len(ringopt.reports())
    compiled = torch.compile(layer, backend="ring", options={"inner_backend": "aot_eager"})
    for x, number in calls(numbers=numbers):
        torch.testing.assert_close(compiled(x, number), layer(x, number))
    return len(ringopt.reports()) - before


def test_a_number_that_only_a_condition_reads_is_fixed():
    """AOTAutograd asks for it: Dynamo starts again once, not for ever."""
    torch._dynamo.reset()
    assert graphs_of(lambda x, number: x if number > 0.5 else x * 2, (0.1, 0.3, 0.7)) <= 6


def test_numbers_fixed_in_one_program_are_open_in_the_next():
    torch._dynamo.reset()
    assert graphs_of(lambda x, number: x * (number * 10**20) * 1e-20, (0.1, 0.3, 0.7)) == 3  # an int of no tensor
    assert graphs_of(lambda x, number: F.scaled_dot_product_attention(x, x, x, scale=number), (0.1, 0.3, 0.7)) == 3
    assert graphs_of(operator.mul, NUMBERS) <= 2  # the first number may be a constant to Dynamo


class OfLengths(nn.Module):
    """Numbers of Python that are made of the length: factors, rotations that slow down, parts of it."""

    def forward(self, x, _number):
        n = x.shape[1]
        base = 10.0 * (2.0 * n / 8 - 1) ** (4 / (4 - 2))
        q = k = x * math.cos(n) * n**-0.5 + torch.arange(n, dtype=x.dtype)[:, None] / base
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], x[:, None], is_causal=True)[:, 0]
        return y[:, : math.ceil(n / 3)].sum(1) * math.sqrt(n) + y[:, round(n / 5) :].sum(1) / int(n * 0.7)


def test_numbers_that_are_made_of_an_open_length():
    draw = torch.Generator().manual_seed(1)
    sizes = (11, 23, 17, 29)
    calls_of_lengths = [(torch.randn(2, n, 8, generator=draw, dtype=torch.float64), 0) for n in sizes]
    reports = run_over(OfLengths(), calls_of_lengths, 3).reports
    assert len(reports) == 2 and [report.refusal for report in reports] == [None, None]
