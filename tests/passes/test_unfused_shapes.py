"""Attention that is spelled out, of other shapes: fewer queries, values of another width, without a batch or heads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn

from tests.harness.translation import validate
from tests.passes.test_find_unfused import BATCH, DEPTH, HEADS, ROWS, WIDTH, Model, away, given


def places():
    return torch.arange(ROWS, dtype=torch.float64)[:, None] * torch.linspace(0, 1, DEPTH, dtype=torch.float64)


SHAPES = {
    "fewer queries": lambda s, q, k, v, m: (q[:, :, :7] @ k.mT).softmax(-1) @ v,
    "keys and queries exchanged": lambda s, q, k, v, m: (k @ q.mT).softmax(-2).mT @ v,
    "one head at a time": lambda s, q, k, v, m: torch.stack(
        [(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(HEADS)], 1
    ),
    "one KV head": lambda s, q, k, v, m: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "one KV head, three dims": lambda s, q, k, v, m: torch.einsum(
        "bhqk,bkd->bhqd", torch.einsum("bhqd,bkd->bhqk", q, k[:, 0]).softmax(-1), v[:, 0]
    ),
    "batch and heads as one": lambda s, q, k, v, m: torch.bmm(
        torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ).view(BATCH, HEADS, ROWS, DEPTH),
    "the keys of each head alone": lambda s, q, k, v, m: (q[:, :1] @ k.mT).softmax(-1) @ v,
    "tokens that a layer has mixed": lambda s, q, k, v, m: (q @ (k + s.mixer(k.mT).mT).mT).softmax(-1) @ v,
    "keys that are places": lambda s, q, k, v, m: (q @ places().mT).softmax(-1) @ v,
    "values that are places": lambda s, q, k, v, m: (q @ k.mT).softmax(-1) @ places(),
    "an equation without its result": lambda s, q, k, v, m: torch.einsum(
        "...ij,...jk", torch.einsum("...ij,...kj", q, k).softmax(-1), v
    ),
    "products squeezed together": lambda s, q, k, v, m: torch.einsum(
        "...qk,...kd->...qd", torch.einsum("...qd,...kd->...qk", q, k).softmax(-1), v
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    verdict = validate(2, Model(SHAPES[name]), *given())
    sites = verdict.report.sites
    assert len(sites) == (HEADS if "at a time" in name else 1) and verdict.wrong == ""
    assert {site.refusal for site in sites} == {None}


class Plain(nn.Module):
    """`core` of q, k and v [S, D], of one sequence: products that have no batch."""

    def __init__(self, core):
        super().__init__()
        torch.manual_seed(0)
        self.core, self.qkv = core, nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.core(*self.qkv(x).chunk(3, -1))


ZERO = torch.zeros((), dtype=torch.float64)


def products(q, k):
    return torch.tensordot(q, k, ([-1], [-1]))


ONE_SEQUENCE = {
    "tensordot": lambda q, k, v: torch.tensordot(products(q, k).softmax(-1), v, 1),
    "tensordot with a mask": lambda q, k, v: torch.tensordot(
        products(q, k).masked_fill(away() > 0, -math.inf).softmax(-1), v, ([1], [0])
    ),
    "tensordot, keys first": lambda q, k, v: torch.tensordot(v, products(k, q).softmax(0), ([0], [0])).T,
    "tensordot over two dims": lambda q, k, v: torch.tensordot(
        torch.tensordot(q.unflatten(1, (HEADS, -1)), k.unflatten(1, (HEADS, -1)), ([1, 2], [1, 2])).softmax(-1), v, 1
    ),
    "tensordot of heads": lambda q, k, v: torch.tensordot(
        products(q.unflatten(1, (HEADS, -1)), k[:, :DEPTH]).softmax(-1), v[:, :DEPTH], ([2], [0])
    ).flatten(1),
    "inner": lambda q, k, v: torch.inner(torch.inner(q, k).softmax(-1), v.T),
    "linalg.matmul": lambda q, k, v: torch.linalg.matmul(torch.linalg.matmul(q, k.T).softmax(-1), v),
    "addmm": lambda q, k, v: torch.addmm(
        ZERO, torch.addmm(ZERO.expand(ROWS, ROWS).masked_fill(away() > 0, -1e9), q, k.T).softmax(-1), v
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(ONE_SEQUENCE)])
def test_products_without_a_batch(name, p):
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    verdict = validate(p, Plain(ONE_SEQUENCE[name]), x)
    (site,) = verdict.report.sites
    assert verdict.wrong == "" and site.refusal is None and verdict.report.sharded_fraction == 1.0
    assert [gather.op for gather in verdict.report.gathers] == ["output"]
