"""A dim that a layer makes, or that is a weight's, holds features; one that comes from the input's rows does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from ringopt.dims.origin import is_learned, origins
from tests.harness.capturing import after


class Layers(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.linear, self.conv, self.norm = nn.Linear(8, 12), nn.Conv1d(8, 6, 1), nn.LayerNorm(8)
        self.table, self.weight = nn.Embedding(20, 8), nn.Parameter(torch.randn(8, 4))
        self.places = nn.Parameter(torch.randn(1, 5, 8))

    def forward(self, x, ids):
        return self.call(self, x, ids)


def kinds(call, dim):
    gm, _ = after([], Layers(call), torch.randn(2, 5, 8), torch.arange(10).view(2, 5))
    (out,) = gm.graph.output_node().args[0]
    return {(origin.kind, origin.last) for origin in origins(out, dim)}


@pytest.mark.parametrize(
    "call, dim, expected",
    [
        (lambda s, x, ids: s.linear(x), 1, {("input", False)}),
        (lambda s, x, ids: s.linear(x), 2, {("features", True)}),
        (lambda s, x, ids: s.linear(x).view(2, 5, 3, 4).transpose(1, 2), 3, {("features", True)}),
        (lambda s, x, ids: s.linear(x).view(2, 5, 3, 4).transpose(1, 2), 2, {("input", False)}),
        (lambda s, x, ids: s.linear(x).chunk(3, -1)[1], 2, {("features", True)}),
        (lambda s, x, ids: s.conv(x.mT), 1, {("features", False)}),
        (lambda s, x, ids: s.norm(x), 2, {("features", True)}),
        (lambda s, x, ids: s.table(ids), 1, {("input", True)}),
        (lambda s, x, ids: s.table(ids), 2, {("features", True)}),
        (lambda s, x, ids: x @ s.weight, 2, {("features", True)}),
        (lambda s, x, ids: s.norm(x + s.places)[:, 1:], 1, {("input", False), ("parameter", False)}),
        (lambda s, x, ids: x.cumsum(-1), 2, {("input", True)}),
    ],
)  # fmt: skip
def test_origins(call, dim, expected):
    assert kinds(call, dim) == expected


def test_learned():
    gm, _ = after(
        [], Layers(lambda s, x, ids: (s.linear(s.places), s.linear(x), torch.ones(3))), torch.ones(2, 5, 8), 1
    )
    assert [is_learned(node) for node in gm.graph.output_node().args[0]] == [True, False, False]
