"""A decoder as language models have it: RMS norm, rotary positions, grouped heads, a gated MLP, shifted labels."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

WIDTH, HEADS, KV_HEADS, WORDS = 64, 4, 2, 101
DEPTH = WIDTH // HEADS


class RMSNorm(nn.Module):
    """Root mean square layer normalization (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Layer(nn.Module):
    """[B, S, WIDTH] -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = RMSNorm(), RMSNorm()
        sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
        self.project = nn.ModuleDict({name: nn.Linear(WIDTH, n * DEPTH, bias=False) for name, n in sizes.items()})
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (project(h).unflatten(-1, (-1, DEPTH)).transpose(1, 2) for project in self.project.values())
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.between(x)
        mixed: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return mixed


class Decoder(nn.Module):
    """Words [B, S] to the loss of the next ones."""

    def __init__(self, layers: int):
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), RMSNorm()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        angles = torch.outer(places.float(), 1e-4 ** (torch.arange(0, DEPTH, 2).float() / DEPTH)).repeat(1, 2)
        x, seen = self.words(ids), (places <= places[:, None])[None, None]
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), seen)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
