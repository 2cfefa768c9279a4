"""What stands in a vmap is found and sharded; other transforms, and what a vmap alone does not decide, stay whole."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ringopt.ir.nodes import op_name
from tests.harness.lengths import run_over
from tests.harness.translation import validate
from tests.passes.test_pairs import Layers, given


def causal(q, k, v):
    """Of one head: q, k, v [S, D]."""
    hidden = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).triu(1)
    return (q @ k.mT / 2).masked_fill(hidden, -math.inf).softmax(-1) @ v


def windowed(m, q, k, v):
    """The mask by a function of two places."""
    places = torch.arange(q.shape[2])
    over_keys = torch.vmap(lambda i, j: (i >= j) & (i - j < 5), (None, 0))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.vmap(over_keys, (0, None))(places, places))


def of_members(m, q, k, v):
    """Models beside each other, as torch.func has an ensemble."""
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return torch.vmap(lambda w: torch.tanh(y * w))(m.memory).mean(0)


def view_written(m, q, k, v):
    """The keys see it."""
    k = k + 1
    torch.vmap(lambda k: k.mT)(k).mul_(0.5)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


WRITTEN_OUT = {
    "one head": lambda m, q, k, v: torch.vmap(torch.vmap(causal))(q, k, v),
    "one sequence": lambda m, q, k, v: torch.vmap(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )(q, k, v),
    "without the gradient of queries": lambda m, q, k, v: torch.vmap(
        torch.vmap(lambda q, k, v: causal(q.detach(), k, v))
    )(q, k, v),
    "a mask": windowed,
    "views": lambda m, q, k, v: (q @ torch.vmap(lambda k: k.mT)(k)).softmax(-1) @ torch.vmap(lambda v: v[:])(v),
    "a view that is written": view_written,
    "members": of_members,
}


def stays(graph):
    return any(op_name(node) == "torch_func" for node in graph.nodes)


@pytest.mark.parametrize("name, p", [(name, 2 + i % 2) for i, name in enumerate(WRITTEN_OUT)])
def test_written_out(name, p):
    verdict = validate(p, Layers(WRITTEN_OUT[name]), given())
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [site.refusal for site in verdict.report.sites] == [None] * 2 and not stays(verdict.graph.graph)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch traces no product in a vmap of open lengths")
def test_lengths_that_are_open():
    calls = [(given(rows),) for rows in (12, 17, 9)]
    (report,) = run_over(Layers(WRITTEN_OUT["one head"], 1), calls, 2, dynamic=True).reports
    assert report.sharded_fraction == 1.0


def half_of(m, q, k, v):
    """A size that is counted in the function, and read behind it too."""
    v = torch.vmap(lambda v: torch.cat([v[:, : v.shape[1] // 2] * 2, v[:, v.shape[1] // 2 :]], 1))(v)
    v = torch.cat([v[:, :, : v.shape[2] // 2], v[:, :, v.shape[2] // 2 :].sin()], 2)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_sizes_that_are_counted_in_a_function_are_no_results_of_it():
    calls = [(given(rows),) for rows in (12, 17, 9)]
    reports = run_over(Layers(half_of), calls, 2, dynamic=True).reports
    assert [(report.refusal, report.sharded_fraction) for report in reports] == [(None, 1.0)] * len(reports), [
        report.notes for report in reports
    ]


def without_gradient(m, q, k, v):
    def one(q, k, v):
        with torch.no_grad():
            scores = q @ k.mT
        return scores.softmax(-1) @ v

    return torch.vmap(one)(q, k, v)


def in_16_bits(m, q, k, v):
    """A product of one dtype, and of two, that autocast computes in a third."""
    q, k, v = q.float(), k.float(), v.float()
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.vmap(lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).float())(q, k, v)
        return y.double() + torch.vmap(lambda y, k, v: ((y @ k.mT) @ v).float())(y.half(), k, v).double()


WHOLE = {
    "a gradient": lambda m, q, k, v: v * torch.vmap(torch.func.grad(lambda x: x.square().mean()))(q),
    "a region without gradient": without_gradient,
    "a region of autocast": in_16_bits,
    "writes": lambda m, q, k, v: torch.vmap(lambda q, v: (q * 2).add_(v))(q, v),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole(name):
    """The attention behind it is sharded."""

    def attend(m, q, k, v):
        return F.scaled_dot_product_attention(q, k, WHOLE[name](m, q, k, v), is_causal=True)

    verdict = validate(2, Layers(attend), given())
    assert verdict.wrong == "" and stays(verdict.graph.graph) and len(verdict.report.sites) == 2
