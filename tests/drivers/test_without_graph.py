"""A function of which Dynamo makes no graph, for a break in a loop or a block of it: what it computes on every rank is
told of."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from ringopt.drivers import without_graph

WIDTH = 8


def held(x: torch.Tensor) -> torch.Tensor:
    if x.isnan().any():
        print("no number")
    return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return held(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class InOne(Layers):
    """The same, with the body of the layer in the loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            q, k, v = layer.qkv(x).chunk(3, -1)
            x = held(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x


class InABlock(Layers):
    """The layers' break stands in a block, in front of the only attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            print("x", end="")
        finally:
            x = x[None]
        return (x + F.scaled_dot_product_attention(x, x, x, is_causal=True))[0]


def said(kind: type[nn.Module], on_refusal: str) -> tuple[list[str], float]:
    """What a rank says, and how much of the last graph is on shards."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    heard, handler = list[str](), logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    without_graph.log.addHandler(handler)
    model, x = kind(), torch.randn(2, 13, WIDTH)
    compiled = torch.compile(model, backend="ring", options={"inner_backend": "eager", "on_refusal": on_refusal})
    try:
        torch.testing.assert_close(compiled(x), model(x))
    except Exception as error:  # as Dynamo wraps it
        heard.append(f"error: {error}")
    finally:
        without_graph.log.removeHandler(handler)
    return heard, ringopt.reports()[-1].sharded_fraction if ringopt.reports() else 0.0


@pytest.mark.parametrize("kind, on_refusal", [(InOne, "warn"), (InOne, "error"), (InOne, "ignore"), (Layers, "warn")])
def test_what_is_computed_without_a_graph_is_told_of(ranks, kind: type[nn.Module], on_refusal: str) -> None:
    (first, share), (second, _) = ranks(2, said, kind, on_refusal)
    if kind is Layers:  # each layer has graphs of its own
        assert first == [] and share == 1.0
    elif on_refusal == "warn":
        (sentence,) = first
        assert sentence.startswith(f"forward ({__file__}:") and second == []
        assert "every rank computes all of its linear, scaled_dot_product_attention: Dynamo ends" in sentence
        assert "(Data-dependent branching)" in sentence
    elif on_refusal == "error":
        assert all("backend='ring' raised" in found[-1] for found in (first, second))
        assert all("RefusedError: forward" in found[-1] for found in (first, second))
    else:
        assert first == second == []


def test_what_stands_behind_a_break_in_a_block_is_told_of(ranks) -> None:
    """It was not traced, but it is named."""
    (first, _), (second, _) = ranks(2, said, InABlock, "warn")
    (sentence,) = first
    assert "every rank computes all of its scaled_dot_product_attention: Dynamo ends a graph at line" in sentence
    assert "The block around that line as a function of its own leaves the rest its graphs" in sentence
    assert second == []
