"""Generated programs without attention: prefix sums, transforms, shifts and slices along the sequence, in any order."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate

WIDTH, LONGEST = 8, 64


def by_transform(m, x):
    """A filter as long as the sequence."""
    n = x.shape[1]
    made = torch.fft.rfft(x, 2 * n, dim=1) * torch.fft.rfft(m.filter[:n], 2 * n, dim=0)
    return torch.fft.irfft(made, 2 * n, dim=1)[:, :n]


def in_chunks(x, dim):
    """A prefix sum inside of chunks of 4 tokens (dim 2), or over them (dim 1)."""
    chunks = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
    return chunks.cumsum(dim).flatten(1, 2)[:, : x.shape[1]] / 8


# Decisions by data have thresholds that no sum comes near by its structure, as it comes to 0.
STEPS = {
    "linear": lambda m, x: m.layers[0](x),
    "sum": lambda m, x: x.cumsum(1) / 8,
    "sum from the end": lambda m, x: x.flip(1).cumsum(1).flip(1) / 8,
    "product": lambda m, x: (torch.sigmoid(x) + 0.3).cumprod(1),
    "sum of exponentials": lambda m, x: x.logcumsumexp(1),
    "largest so far": lambda m, x: x.cummax(1).values,
    "states": lambda m, x: (x[..., :, None] * x[..., None, :4]).cumsum(1).sum(-1) / 8,
    "time first": lambda m, x: x.transpose(0, 1).cumsum(0).transpose(0, 1) / 4,
    "inside of chunks": lambda m, x: in_chunks(x, 2),
    "over chunks": lambda m, x: in_chunks(x, 1),
    "over features": lambda m, x: x.cumsum(-1) / 4,
    "by transform": by_transform,
    "spectrum": lambda m, x: torch.fft.irfft(torch.fft.rfft(x.mT).abs(), x.shape[1]).mT / 4,
    "real part": lambda m, x: torch.fft.fft(x, dim=1).real / 4,
    "sorted": lambda m, x: x.sort(1).values,
    "difference": lambda m, x: x - F.pad(x, (0, 0, 1, 0))[:, :-1],
    "rolled": lambda m, x: x.roll(2, 1),
    "convolution": lambda m, x: F.conv1d(F.pad(x.mT, (2, 0)), m.taps, groups=WIDTH).mT,
    "softmax": lambda m, x: x.softmax(1) * x,
    "mean": lambda m, x: x - x.mean(1, keepdim=True),
    "tail": lambda m, x: x[:, 1:] if x.shape[1] > 9 else x,
    "every second": lambda m, x: x[:, ::2] if x.shape[1] > 13 else x,
    "first again": lambda m, x: torch.cat([x[:, :1], x], 1),
    "behind learned": lambda m, x: torch.cat([m.first.expand(x.shape[0], -1, -1), x], 1),
    "positions": lambda m, x: x + torch.arange(x.shape[1]).to(x)[:, None].sin(),
    "counted": lambda m, x: x * (x > 0.0123).cumsum(1).to(x) / 8,
    "hidden by a sum": lambda m, x: x * (x.cumsum(1) > 0.3711),
    "norm": lambda m, x: F.layer_norm(x, (WIDTH,)),
}

ENDS = {
    "all": lambda m, x: m.layers[1](x),
    "last": lambda m, x: m.layers[1](x[:, -1]),
    "mean": lambda m, x: m.layers[1](x).mean(1),
    "with a sum": lambda m, x: (m.layers[1](x), x.cumsum(1)[:, -1]),
}


class Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.taps, self.first = nn.Parameter(torch.randn(WIDTH, 1, 3)), nn.Parameter(torch.randn(1, 2, WIDTH))
        self.filter = nn.Parameter(torch.randn(LONGEST, 1) / 4)
        self.steps = [(drawn.choice(list(STEPS)), drawn.random() < 0.4) for _ in range(drawn.randrange(2, 7))]
        self.end = drawn.choice(list(ENDS))
        self.p, batch, rows = drawn.choice([2, 3, 4]), drawn.choice([1, 2, 3]), drawn.choice([13, 16, 17, 24, 31])
        self.double()
        self.x = torch.randn(batch, rows, WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(self, x):
        x = self.layers[0](x)
        for name, beside in self.steps:
            y = STEPS[name](self, x)
            x = x + y if beside and y.shape == x.shape else y
        return ENDS[self.end](self, x)


@pytest.mark.parametrize("first, count", [(0, 10), pytest.param(10, 410, marks=pytest.mark.zoo)])
def test_programs_without_attention(first, count):
    sharded = 0
    for seed in range(first, first + count):
        program = Program(seed)
        verdict = validate(program.p, program, program.x)
        assert verdict.wrong == "" and verdict.report.refusal is None, (seed, program.steps, program.end, verdict.wrong)
        sharded += verdict.report.sharded_fraction > 0
    assert sharded > count // 2
