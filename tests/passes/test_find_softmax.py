"""A softmax that is spelled out becomes one softmax; what only looks like one stays."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from ringopt.passes.find_softmax import FindSoftmax
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops, results

PASSES = [Normalize(), FindSoftmax()]


class Program(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.register_buffer("triangle", torch.ones(5, 7, dtype=torch.float64).tril())
        self.register_buffer("numbers", torch.rand(5, 7, dtype=torch.float64))

    def forward(self, x, v, kept):
        return self.call(x, v, {"triangle": self.triangle, "numbers": self.numbers, "given": kept})


def given():
    torch.manual_seed(0)
    x, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5, 7), (2, 3, 7, 4)))
    kept = torch.rand(5, 7) < 0.7
    kept[:, 2] = True
    return x, v, kept


def careful(x):
    return (x - x.amax(-1, keepdim=True)).exp()


def with_max(x):
    return (x - x.max(-1, keepdim=True).values.detach()).exp()


def normalised(e, dim=-1):
    return e / e.sum(dim, keepdim=True)


SPELLINGS = {
    "plain": lambda x, v, kept: normalised(x.exp()),
    "careful": lambda x, v, kept: normalised(careful(x)),
    "another way to the maximum": lambda x, v, kept: normalised(with_max(x)),
    "another dim": lambda x, v, kept: normalised((x - x.amax(1, True)).exp(), 1),
    "normalised late": lambda x, v, kept: (e := careful(x)) @ v / e.sum(-1, keepdim=True),
    "normalised late, einsum": lambda x, v, kept: (
        torch.einsum("bhqk,bhkd->bhqd", (e := careful(x)), v) / e.sum(-1, keepdim=True)
    ),
    "kept entries only": lambda x, v, kept: normalised(careful(x) * kept["given"]),
    "kept entries of a softmax": lambda x, v, kept: normalised(x.softmax(-1) * kept["given"].double()),
    "kept entries, as numbers of another shape": lambda x, v, kept: normalised(
        careful(x) * kept["given"].double()[None, :, None].transpose(1, 2)
    ),
    "powers of two": lambda x, v, kept: normalised(torch.exp2(x - x.amax(-1, True))),
    "powers of two, normalised late": lambda x, v, kept: (e := torch.exp2(x)) @ v / e.sum(-1, keepdim=True),
    "of logarithms": lambda x, v, kept: torch.log_softmax(x, 1).exp(),
    "less its logarithm": lambda x, v, kept: (x - x.logsumexp(-1, keepdim=True)).exp(),
    "of whole numbers": lambda x, v, kept: normalised((x * 3).long().exp()).double(),
    "kept entries of a softmax in a wider dtype": lambda x, v, kept: normalised(
        x.float().softmax(-1, dtype=torch.float64) * kept["given"].double()
    ),
    "entries that a buffer keeps": lambda x, v, kept: normalised(x.softmax(-1) * kept["triangle"]),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPELLINGS)
def test_one_softmax(name):
    gm, _ = after(PASSES, Program(SPELLINGS[name]), *given())
    assert ops(gm).count("softmax") == 1 and "exp" not in ops(gm) and "div" not in ops(gm)
    original, _ = after([], Program(SPELLINGS[name]), *given())
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, gm.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected)


NO_SOFTMAX = {
    "an epsilon in the sum": lambda x, v, kept: (e := x.exp()) / (e.sum(-1, keepdim=True) + 1e-3),
    "the sum over another dim": lambda x, v, kept: (e := x.exp()) @ v / e.sum(-2, keepdim=True).sum(-1, keepdim=True),
    "weights of any size": lambda x, v, kept: normalised(x.exp() * v[:, :, :5, :1]),
    "weights that a buffer holds": lambda x, v, kept: normalised(x.exp() * kept["numbers"]),
    "another sum": lambda x, v, kept: x.exp() / careful(x).sum(-1, keepdim=True),
    "both factors of a product": lambda x, v, kept: (e := x[..., :5].exp()) @ e / e.sum(-1, keepdim=True),
    "no exponential": lambda x, v, kept: normalised(x.square()),
}


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_what_is_none_stays(name):
    gm, _ = after(PASSES, Program(NO_SOFTMAX[name]), *given())
    assert "softmax" not in ops(gm) and "div" in ops(gm)


@pytest.mark.parametrize("alpha, beta", [(1, 1), (0.5, 1), (0.5, 2.0), (1, 0)])
def test_baddbmm_is_a_product_and_a_sum(alpha, beta):
    class Scores(nn.Module):
        def forward(self, bias, q, k):
            return torch.baddbmm(bias, q, k, alpha=alpha, beta=beta)

    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((5, 7), (3, 5, 4), (3, 4, 7))]
    gm, _ = after(PASSES, Scores(), *inputs)
    assert "bmm" in ops(gm) and "baddbmm" not in ops(gm) and ("add" in ops(gm)) == (beta != 0)
    torch.testing.assert_close(gm(*gm.meta["inputs"])[0], Scores()(*inputs))


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_mask_of_more_dims_than_the_weights_is_taken_with_its_own(dim):
    """Dim 2 of the masked weights is another than dim 2 of the weights."""
    program = Program(lambda x, v, kept: normalised(x[0].softmax(2) * kept["given"].expand(2, 3, 5, 7).double(), dim))
    gm, _ = after(PASSES, program, *given())
    original, _ = after([], program, *given())
    for found, expected in zip(results(gm, gm.meta["inputs"]), results(original, gm.meta["inputs"]), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_careful_softmax_under_a_mask_of_more_dims_stays():
    program = Program(lambda x, v, kept: normalised(careful(x[0, 0]) * kept["given"].expand(2, 3, 5, 7).double()))
    gm, _ = after(PASSES, program, *given())
    assert "softmax" not in ops(gm)
