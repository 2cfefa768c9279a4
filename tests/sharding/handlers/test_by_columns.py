"""Ops that mix all rows and keep columns apart: columns are spread for them, and nothing is gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate
from tests.programs.test_lengths import run_over
from tests.sharding.programs import B, D, Model, case, check, inputs

N = 13

T = lambda x: x.transpose(1, 2)  # noqa: E731


def resampled(how, back):
    return lambda m, x: x + T(back(how(T(m.linear(x)))))


def long_filter(m, x):
    """As Hyena convolves: over twice as many rows, in frequencies."""
    spectrum = torch.fft.rfft(x, 2 * N, dim=1) * torch.fft.rfft(m.vector.tanh(), 2 * N)[:, None]
    return torch.fft.irfft(spectrum, 2 * N, dim=1)[:, :N]


def segments(x):
    return (torch.arange(N) // 3)[None, :, None].expand_as(x)


STEPS = {
    "sort": lambda m, x: x.sort(1).values,
    "sort, both": lambda m, x: (lambda values, at: values * at)(*x.sort(1, descending=True)),
    "argsort": lambda m, x: x * x.argsort(1),
    "cumprod": lambda m, x: x.tanh().cumprod(1),
    "logcumsumexp": lambda m, x: x.logcumsumexp(1),
    "cummax": lambda m, x: x.cummax(1).values,
    "behind heads": lambda m, x: x.unflatten(2, (1, -1)).transpose(1, 2).cumprod(2).transpose(1, 2).flatten(2),
    "median": lambda m, x: x * x.median(1, keepdim=True)[0],
    "a few largest": lambda m, x: x + x.topk(2, 1).values.sum(1, keepdim=True),
    "many largest": lambda m, x: m.linear(x.topk(11, 1).values).sum(1, keepdim=True) * x,
    "fft": lambda m, x: torch.fft.fft(x, dim=1).real,
    "fft, conjugate": lambda m, x: torch.fft.ifft(torch.fft.fft(x, dim=1).conj(), dim=1).real,
    "long filter": long_filter,
    "linear": resampled(lambda x: F.interpolate(x, scale_factor=2, mode="linear"), lambda x: F.avg_pool1d(x, 2)),
    "three times": resampled(lambda x: F.interpolate(x, scale_factor=3), lambda x: F.avg_pool1d(x, 3)),
    "differences of differences": lambda m, x: F.pad(x.diff(2, dim=1), (0, 0, 1, 1)),
    "product": lambda m, x: x * x.prod(1, keepdim=True),
    "norm of order 3": lambda m, x: x * torch.linalg.vector_norm(x, 3, 1, keepdim=True),
    "padding that is not counted": lambda m, x: x + T(F.avg_pool1d(T(x), 3, 1, 1, count_include_pad=False)),
    "largest of segments": lambda m, x: torch.zeros_like(x).scatter_reduce(1, segments(x), x, "amax") + x,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    p, layout = case(STEPS, name)
    verdict = check(STEPS[name], p=p, layout=layout, n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


def turns(verdict):
    return len(verdict.graph.graph.find_nodes(op="call_function", target=torch.ops.ringopt.turn.default))


def test_columns_stay_columns_for_the_next_op_of_the_kind():
    """The order of an order: the rank of each number."""
    verdict = check(lambda m, x: x * x.argsort(1).argsort(1), n=N)
    assert turns(verdict) == 2
    verdict = check(lambda m, x: (lambda y: x * y + y.sort(1).values)(x.tanh().cumprod(1)), n=N)
    assert turns(verdict) == 3  # rows of the product are wanted too


def test_what_was_gathered_for_another_is_not_turned():
    verdict = check(lambda m, x: torch.renorm(x, 2, 0, 0.5) * x.sort(1).values, n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["renorm", "output"] and not turns(verdict)


def test_of_what_is_above_the_first_attention_too():
    class Above(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def forward(self, x, ids):
            x = x + self.model.table(ids)
            return self.model.attention(x + torch.fft.fft(self.model.linear(x), dim=1).real)

    torch.manual_seed(0)
    verdict = validate(3, Above().double(), *inputs(N))
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]


@pytest.mark.zoo
def test_a_sequence_of_open_length():
    calls = [(*inputs(n),) for n in (N, N + 2, N + 5)]
    found = run_over(Model(lambda m, x: x.sort(1).values + x.cumprod(1)).double(), calls, 2)
    assert [gather.op for report in found.reports for gather in report.gathers] == ["output"] * 2


def test_what_mixes_columns_too_is_gathered():
    verdict = check(lambda m, x: torch.renorm(x, 2, 0, 0.5), n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["renorm", "output"]


def test_columns_that_ranks_cannot_share_are_gathered():
    """A number for each row: of B samples, for more ranks."""
    verdict = check(lambda m, x: x * x[..., 0].sort(1).values[..., None], p=B + 1, layout="contiguous", n=N)
    assert [gather.op for gather in verdict.report.gathers] == ["sort", "output"]
    assert D >= B + 1
