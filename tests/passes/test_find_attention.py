"""Every calling form of scaled_dot_product_attention becomes one node; the numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after, ops, results
from tests.harness.translation import validate

PASSES = [Normalize(), FindAttention()]


class Calls(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, q, k, v):
        return self.call(q, k, v)


sdpa = F.scaled_dot_product_attention


def qkv(*lead, rows=5, keys=5, kv_heads=None):
    lead_kv = (*lead[:-1], kv_heads) if kv_heads else lead
    return [
        torch.randn(*d, n, 8, dtype=torch.float64, requires_grad=True)
        for d, n in ((lead, rows), (lead_kv, keys), (lead_kv, keys))
    ]


FORMS = {
    "positional": (lambda q, k, v: sdpa(q, k, v), (2, 4), {}),
    "all positional": (lambda q, k, v: sdpa(q, k, v, None, 0.0, True), (2, 4), {}),
    "keywords": (lambda q, k, v: sdpa(value=v, query=q, key=k, is_causal=True), (2, 4), {}),
    "scale": (lambda q, k, v: sdpa(q, k, v, scale=0.3), (2, 4), {}),
    "grouped": (lambda q, k, v: sdpa(q, k, v, is_causal=True, enable_gqa=True), (2, 4), {"kv_heads": 2}),
    "bool mask": (lambda q, k, v: sdpa(q, k, v, torch.ones(5, 5, dtype=torch.bool).tril(1)), (2, 4), {}),
    "float mask": (lambda q, k, v: sdpa(q, k, v, attn_mask=torch.linspace(0, 1, 25).view(5, 5).double()), (2, 4), {}),
    "cross": (lambda q, k, v: sdpa(q, k, v), (2, 4), {"keys": 7}),
    "three dims": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (6,), {}),
    "three dims, mask": (lambda q, k, v: sdpa(q, k, v, torch.eye(5, dtype=torch.bool)[None].expand(6, 5, 5)), (6,), {}),
    "two dims": (lambda q, k, v: sdpa(q, k, v), (), {}),
    "five dims": (lambda q, k, v: sdpa(q, k, v, is_causal=True), (2, 3, 4), {}),
    "five dims, mask": (
        lambda q, k, v: sdpa(q, k, v, torch.eye(5, dtype=torch.bool).expand(2, 3, 4, 5, 5)),
        (2, 3, 4),
        {},
    ),
    "five dims, mask of one batch dim": (
        lambda q, k, v: sdpa(q, k, v, torch.eye(5, dtype=torch.bool).expand(3, 1, 5, 5)),
        (2, 3, 4),
        {},
    ),
    "keys for all of the batch": (lambda q, k, v: sdpa(q, k[:1], v[:1], is_causal=True), (2, 4), {}),
    "one KV head, broadcast": (lambda q, k, v: sdpa(q, k, v), (2, 4), {"kv_heads": 1}),
    "one query head, broadcast": (lambda q, k, v: sdpa(q[:, :1], k, v), (2, 4), {}),
    "one head of values": (lambda q, k, v: sdpa(q, k, v[:, :1]), (2, 4), {}),
    "queries without a batch": (lambda q, k, v: sdpa(q[0], k, v), (2, 4), {}),
    "grouped, keys for all of the batch": (
        lambda q, k, v: sdpa(q, k[:1], v, enable_gqa=True),
        (2, 4),
        {"kv_heads": 2},
    ),
    "three dims, keys for all of the batch": (lambda q, k, v: sdpa(q, k[:1], v[:1]), (6,), {}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMS)
def test_one_canonical_node(name):
    call, lead, sizes = FORMS[name]
    inputs = qkv(*lead, **sizes)
    gm, context = after(PASSES, Calls(call), *inputs)
    assert ops(gm).count("attention") == 1 and "scaled_dot_product_attention" not in ops(gm)
    ((node, info),) = context.sites.items()
    assert info.form == "sdpa" and info.refusal is None
    assert [operand.meta["val"].dim() for operand in node.args[:3]] == [4, 4, 4]
    original, _ = after([], Calls(call), *inputs)
    given = gm.meta["inputs"]
    for found, expected in zip(results(gm, given), results(original, given), strict=True):
        torch.testing.assert_close(found, expected)


class Heads(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=batch_first)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", (True, False))
def test_multihead_attention(batch_first):
    _, context = after(PASSES, Heads(batch_first), torch.randn(3, 5, 16))
    assert [(info.form, info.module) for info in context.sites.values()] == [("multihead_attention", "attention")]


def test_a_whole_encoder_layer_is_taken_apart():
    """Under no_grad torch runs the layer as one operator."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    with torch.no_grad():
        x = torch.randn(3, 5, 16)
        gm, context = after(PASSES, layer, x)
        assert len(context.sites) == 1
        torch.testing.assert_close(gm(*gm.meta["inputs"])[0], layer(x))


@pytest.mark.parametrize(
    "call, lead, sentence",
    [
        (lambda q, k, v: sdpa(q, k, v[:, :1], enable_gqa=True), (2, 4), "have different numbers of heads"),
    ],
)
def test_refusals(call, lead, sentence):
    gm, context = after(PASSES, Calls(call), *qkv(*lead))
    (info,) = context.sites.values()
    assert sentence in info.refusal and "scaled_dot_product_attention" in ops(gm)


@pytest.mark.parametrize("dropout", (0.0, 0.5))
def test_attention_that_nobody_reads_is_no_site(dropout):
    class Unread(nn.Module):
        def forward(self, x):
            y = x.sin()
            z = F.scaled_dot_product_attention(y, y, y, dropout_p=dropout)
            F.scaled_dot_product_attention(z, z, (z @ z.mT).softmax(-1) @ z)
            return F.scaled_dot_product_attention(y, y, y)

    verdict = validate(2, Unread(), torch.randn(2, 1, 5, 4, dtype=torch.float64, requires_grad=True))
    assert len(verdict.report.sites) == 1 and verdict.wrong == ""
