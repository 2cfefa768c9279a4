"""One program with an op of every family, on real ranks and through the compilers."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.errors import worst_of
from tests.harness.models import difference
from tests.sharding.programs import D, Model

T = lambda x: x.transpose(1, 2)  # noqa: E731


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.model, self.convolution, self.norm = Model(), nn.Conv1d(D, D, 4, padding=3, groups=D), nn.BatchNorm1d(D)

    def forward(self, x, labels):
        x = self.model.attention(x)
        x = x + T(self.norm(self.convolution(T(x))[..., : x.shape[1]]))
        x = torch.cat([self.model.vector.expand(x.shape[0], 1, D), x[:, 1:]], 1)
        x = x * x.softmax(1) + x.cumsum(1) / x.amax(1, keepdim=True) + x.flip(1)
        logits = self.model.attention(x)
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, D), labels[:, 1:].reshape(-1))
        return loss, logits[:, 0], logits[:, -1:].max(1)[0]


def results(run, module, x, labels):
    x = x.clone().requires_grad_()
    outputs = run(x, labels)
    sum(out.sum() * (i + 1) for i, out in enumerate(outputs)).backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [out.detach() for out in outputs] + [x.grad, *gradients] + [b.double() for b in module.buffers()]


def on_rank(inner, layout, n):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x, labels = torch.randn(2, n, D, dtype=torch.float64), torch.randint(0, D, (2, n))
    made = []
    for compiled in (False, True):
        torch.manual_seed(1)
        module = Everything().double()
        options = {"inner_backend": inner, "layout": layout, "timeout": 60}
        run = torch.compile(module, backend="ring", options=options) if compiled else module
        made.append(results(run, module, x, labels))
    bits = [float(value.sum()) for value in made[1]]
    return difference(made[1], made[0]), ringopt.reports()[-1].gathers, bits


# Through Inductor, ranks of equally many rows: they share their kernels.
@pytest.mark.parametrize(
    "p, inner, layout, n",
    [pytest.param(2, "inductor", "zigzag", 12, marks=pytest.mark.zoo), (2, "aot_eager", "contiguous", 13)],
)
def test_everything(ranks, p, inner, layout, n):
    found = ranks(p, on_rank, inner, layout, n, timeout=240)
    for error, gathers, bits in found:
        assert error < 1e-9
        assert gathers == ()
        assert bits == found[0][2], "the ranks differ"


class OneHead(nn.Module):
    """Queries, keys and values are one tensor: its gradient is a sum, of one channel, in rows of open number."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(D, D), nn.Conv1d(D, D, 3, padding=1)

    def forward(self, x):
        y = self.linear(x)[:, None]
        y = F.scaled_dot_product_attention(y, y, y)[:, 0]
        return T(self.convolution(T(y))) + y.cumprod(1)


def of_open_sizes():
    torch._dynamo.reset()
    module = OneHead().double()
    compiled, errors = torch.compile(module, backend="ring", dynamic=True, options={"timeout": 60}), []
    for b, n in ((3, 12), (2, 15)):
        x = torch.randn(b, n, D, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
        found = []
        for run in (module, compiled):
            module.zero_grad()
            given = x.clone().requires_grad_()
            out = run(given)
            out.square().sum().backward()
            found.append([out.detach(), given.grad, *(p.grad.clone() for p in module.parameters())])
        errors.append(difference(*found[::-1]))
    return errors, [gather.op for gather in ringopt.reports()[-1].gathers]


@pytest.mark.zoo
def test_open_batch_and_rows_through_inductor(ranks):
    for errors, gathers in ranks(2, of_open_sizes, timeout=240):
        assert worst_of(*errors) < 1e-9 and gathers == ["output"]
