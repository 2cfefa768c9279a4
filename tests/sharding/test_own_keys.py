"""Attention in which each query has keys of its own: those of the tokens, to which the edge between the two is added.

    k = keys[:, None] + edges   # [B, Sq, Sk, D]   ->   k_rows = gather(keys_rows)[:, None] + edges_rows

(Dwivedi and Bresson 2020, A Generalization of Transformer Networks to Graphs.) Queries stand in the place of heads, one
row each. They are sharded, and pairs of tokens, of which there are the most, stay where they are.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from ringopt.ir.nodes import op_name
from tests.harness.lengths import run_over
from tests.harness.translation import validate

WIDTH, HEADS = 8, 2


class Graph(nn.Module):
    """Two layers over nodes [B, S, D] and edges [B, S, S, E]; `mask` [B, S] hides nodes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.edge, self.out = nn.Linear(5, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def layer(self, x, edges, mask):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for t in self.split(x))
        pairs = self.edge(edges).unflatten(-1, (HEADS, -1)).permute(0, 3, 1, 2, 4).flatten(0, 1)
        scores = torch.einsum("bid,bijd->bij", q, k[:, None] + pairs) / 2
        if mask is not None:
            hidden = ~(mask[:, :, None] & mask[:, None]).repeat_interleave(HEADS, 0)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        y = torch.einsum("bij,bijd->bid", scores.softmax(-1), v[:, None] + pairs)
        return x + self.out(y.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)).tanh()

    def split(self, x):
        return self.q(x), *self.kv(x).chunk(2, -1)

    def forward(self, x, edges, mask=None):
        return self.layer(self.layer(x, edges, mask), edges, mask)


def given(rows=12):
    torch.manual_seed(1)
    x, edges = torch.randn(2, rows, WIDTH).double(), torch.randn(2, rows, rows, 5).double()
    return x.requires_grad_(), edges.requires_grad_(), torch.arange(rows) < torch.tensor([[rows], [rows - 3]])


@pytest.mark.parametrize("masked, p", [(False, 3), (True, 2)])
def test_queries_are_sharded_with_their_keys(masked, p):
    verdict = validate(p, Graph(), *given()[: 2 + masked])
    assert verdict.wrong == "" and verdict.report.sharded_fraction == 1.0
    assert [site.strategy for site in verdict.report.sites] == ["none"] * 2
    assert "so none needs another rank's" in verdict.report.sites[0].notes[0]
    # What is gathered are keys and values of tokens; no pairs change hands.
    assert {gather.op for gather in verdict.report.gathers} == {"add", "output"}
    assert max(gather.bytes for gather in verdict.report.gathers) == 2 * 12 * WIDTH * 8
    assert "turn" not in map(op_name, verdict.graph.graph.nodes)


def test_fewer_queries_than_two_a_rank():
    verdict = validate(3, Graph(), *given(5))
    assert verdict.wrong == ""


def test_lengths_that_are_open():
    reports = run_over(Graph(), [given(rows) for rows in (12, 15, 9)], 2, dynamic=True).reports
    assert [report.sharded_fraction for report in reports] == [1.0] * len(reports)
