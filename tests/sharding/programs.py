"""One program around each step: attention, the step, attention, an end. What the tests of sharding are tables of."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import validate_module

B, N, D, H = 2, 11, 8, 2


class Model(nn.Module):
    """Attention, a step, attention, and an end."""

    def __init__(self, step=lambda m, x: x, end=lambda m, x: x, causal=True):
        super().__init__()
        self.step, self.end, self.causal = step, end, causal
        self.qkv, self.linear, self.wide = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.conv, self.norm, self.table = nn.Conv1d(D, D, 3, padding=1), nn.LayerNorm(D), nn.Embedding(40, D)
        self.vector = nn.Parameter(torch.randn(D))
        self.register_buffer("count", torch.zeros(D))

    def attention(self, x):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, H, D // H).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, n, D)

    def forward(self, x, ids):
        x = x + self.table(ids)
        x = self.attention(x)
        x = self.step(self, x)
        return self.end(self, self.attention(x)), ids


def inputs(n=N):
    return torch.randn(B, n, D, dtype=torch.float64, requires_grad=True), torch.randint(0, 40, (B, n))


def check(step=lambda m, x: x, end=lambda m, x: x, p=2, n=N, **options):
    torch.manual_seed(0)
    verdict = validate_module(p, Model(step, end).double(), *inputs(n), **options)
    assert not verdict.wrong, f"{verdict.wrong}\n{verdict.graph.graph}"
    return verdict


CASES = [(2, "contiguous"), (3, "zigzag"), (3, "contiguous"), (2, "zigzag"), (4, "contiguous")]


def case(table, name):
    """Ranks and layout, spread over the names of a table."""
    return CASES[list(table).index(name) % len(CASES)]
