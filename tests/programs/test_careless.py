"""Eighteen programs whose loss or logits go wrong when a sequence is sharded carelessly: loss, outputs and every
gradient are those of one process, and every attention is sharded.

DeepSpeed AutoSP on such programs (2 ranks, forward): 2 right, 8 silently wrong, 8 refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.translation import TOLERANCE, captured_graphs, validate_graph

ROWS, WORDS, WIDTH, HEADS = 16, 50, 32, 4
HEAD = WIDTH // HEADS


@dataclass(frozen=True)
class Case:
    """How attention is written, how positions and the loss are formed, how long the sequence is."""

    attention: str = "plain"
    end: str = "plain"
    rows: int = ROWS
    ignored: int = 0


CASES = {
    "plain": Case(),
    "a square mask": Case("mask"),
    "ignored labels": Case(ignored=4),
    "labels shifted by a slice": Case(end="slice"),
    "labels shifted by a pad": Case(end="pad", ignored=4),
    "positions by cumsum": Case(end="cumsum"),
    "mean pooling": Case(end="mean"),
    "the last token": Case(end="last"),
    "an odd length": Case(rows=ROWS + 1),
    "keys are values": Case("shared"),
    "positions by arange": Case(end="arange"),
    "a graph break": Case(end="break"),
    "keywords": Case("keywords"),
    "one head of keys": Case("grouped"),
    "values used again": Case("reused"),
    "three dims": Case("folded"),
    "written out": Case("unfused"),
    "nn.MultiheadAttention": Case("module"),
}


class Attention(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.few, self.whole = nn.Linear(WIDTH, 2 * HEAD), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        if self.kind == "module":
            return self.whole(x, x, x, need_weights=False)[0]
        return self.out(self.attend(x).transpose(1, 2).flatten(2))

    def attend(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, HEAD)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        few = [part.unsqueeze(1) for part in self.few(x).chunk(2, -1)]
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.kind == "mask" else None
        attend = F.scaled_dot_product_attention
        return {
            "plain": lambda: attend(q, k, v, is_causal=True),
            "mask": lambda: attend(q, k, v, seen),
            "keywords": lambda: attend(query=q, key=k, value=v, is_causal=True),
            "shared": lambda: attend(q, k, k, is_causal=True),
            "grouped": lambda: attend(q, *few, is_causal=True, enable_gqa=True),
            "reused": lambda: attend(q, k, v, is_causal=True) + 0.5 * v,
            "folded": lambda: attend(*(t.flatten(0, 1) for t in (q, k, v)), is_causal=True).view(q.shape),
            "unfused": lambda: torch.softmax(q @ k.transpose(-2, -1) / HEAD**0.5, -1) @ v,
        }[self.kind]()


class Model(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.end, self.head = case.end, nn.Linear(WIDTH, WORDS)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * ROWS, WIDTH)
        self.layers = nn.ModuleList(Attention(case.attention) for _ in range(2))

    def forward(self, ids, labels, places):
        if self.end == "arange":
            places = torch.arange(ids.shape[1])[None]
        if self.end == "cumsum":
            places = (ids >= 0).long().cumsum(1) - 1
        x = self.words(ids) + self.places(places)
        for layer in self.layers:
            x = x + layer(x)
        if self.end == "break":
            torch._dynamo.graph_break()
        return self.loss(x, labels)

    def loss(self, x, labels):
        if self.end == "mean":
            return F.cross_entropy(self.head(x.mean(1)), labels[:, 0])
        logits = self.head(x)
        if self.end == "last":
            return logits[:, -1].sum() + 0 * labels.sum()
        if self.end == "slice":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.end == "pad":
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1)), logits


@lru_cache(maxsize=1)
def graphs_of(name: str):
    torch.manual_seed(0)
    case = CASES[name]
    ids, labels = torch.randint(0, WORDS, (2, 1, case.rows))
    labels[:, : case.ignored] = -100
    given = (ids, labels, torch.arange(case.rows)[None])
    return captured_graphs(Model(case).double(), given, {}, fullgraph=case.end != "break")


RUNS = [
    pytest.param(name, p, marks=[] if (number + p) % 2 else [pytest.mark.zoo], id=f"{name}, {p} ranks")
    for number, name in enumerate(CASES)
    for p in (2, 3)
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name, p", RUNS)
def test_right_and_sharded(name, p):
    found = [validate_graph(p, *graph, TOLERANCE) for graph in graphs_of(name)]
    assert len(found) == (2 if CASES[name].end == "break" else 1)
    assert [verdict.wrong for verdict in found if verdict.wrong] == []
    sites = [site for verdict in found for site in verdict.report.sites]
    assert [site.refusal for site in sites] == [None, None]
