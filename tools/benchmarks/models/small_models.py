"""Small models whose attention is one call, or spelled out, each with another mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

HEADS, DEPTH, LAYERS = 8, 64, 2
WIDTH = HEADS * DEPTH


@dataclass(frozen=True)
class Case:
    """`mask(layer, scores [B, H, S, S], kept [B, S])` gives the scores to normalise. `fused`: by
    F.scaled_dot_product_attention, which is told nothing but `is_causal`. In training, weights are dropped with
    probability `dropout`, and values of the results with `values`."""

    mask: Callable[[Attention, Tensor, Tensor], Tensor] = lambda layer, scores, kept: scores
    kv_heads: int = HEADS
    dropout: float = 0.0
    values: float = 0.0
    fused: bool = False
    is_causal: bool = False

    @property
    def draws(self) -> bool:
        return self.dropout > 0 or self.values > 0


class Attention(nn.Module):
    """[B, S, WIDTH] -> the same."""

    triangle: Tensor
    slopes: Tensor

    def __init__(self, case: Case, length: int):
        super().__init__()
        self.case = case
        self.project = nn.Linear(WIDTH, WIDTH + 2 * case.kv_heads * DEPTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("triangle", torch.ones(length, length).tril())
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        sizes = [WIDTH, self.case.kv_heads * DEPTH, self.case.kv_heads * DEPTH]
        q, k, v = (part.unflatten(-1, (-1, DEPTH)).transpose(1, 2) for part in self.project(x).split(sizes, -1))
        if self.case.fused:
            grouped = self.case.kv_heads < HEADS
            heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.case.is_causal, enable_gqa=grouped)
        else:
            heads = self.spelled_out(q, k, v, kept)
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return F.dropout(mixed, self.case.values, self.training)

    def spelled_out(self, q: Tensor, k: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        if self.case.kv_heads < HEADS:
            k, v = (part.repeat_interleave(HEADS // self.case.kv_heads, dim=1) for part in (k, v))
        scores = self.case.mask(self, q @ k.transpose(-2, -1) / math.sqrt(DEPTH), kept)
        return F.dropout(scores.softmax(-1), self.case.dropout, self.training) @ v


class Model(nn.Module):
    """Residual layers of one kind of attention, [B, S, WIDTH] to the same. `kept`: [B, S], 0 at padding."""

    def __init__(self, name: str, length: int):
        super().__init__()
        self.layers = nn.ModuleList(Attention(CASES[name], length) for _ in range(LAYERS))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)), kept)
        return x


def _causal(layer: Attention, scores: Tensor, _kept: Tensor) -> Tensor:
    length = scores.shape[-1]
    return scores.masked_fill(layer.triangle[:length, :length] == 0, -math.inf)


def _padding(_layer: Attention, scores: Tensor, kept: Tensor) -> Tensor:
    return scores.masked_fill(kept[:, None, None] == 0, -math.inf)


def _alibi(layer: Attention, scores: Tensor, kept: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return _causal(layer, scores + layer.slopes[:, None, None] * (places - places[:, None]), kept)


CASES = {
    "sdpa": Case(fused=True),
    "sdpa-causal": Case(fused=True, is_causal=True),
    "sdpa-gqa": Case(fused=True, is_causal=True, kv_heads=2),
    "plain": Case(),
    "causal": Case(_causal),
    "padding": Case(_padding),
    "alibi": Case(_alibi),
    "dropout": Case(dropout=0.1),
    "dropout-values": Case(fused=True, is_causal=True, values=0.1),
    "gqa": Case(_causal, kv_heads=2),
}


def build(name: str, length: int) -> tuple[Model, Tensor, Tensor]:
    """The model, x [1, length, WIDTH], and kept [1, length]: the last quarter is padding. The same on every call."""
    torch.manual_seed(0)
    kept = (torch.arange(length) < length - length // 4).long()[None]
    return Model(name, length), torch.randn(1, length, WIDTH), kept
