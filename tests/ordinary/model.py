"""One small model around each program: an embedding, attention, the program, which may use `second`, more attention.

    @case(mix=lambda: nn.Linear(WIDTH, WIDTH))
    def gated(m, x, ids, lengths, labels):
        return labels_loss(m, m.second(x * m.mix(x)), labels)

`x` [BATCH, rows, WIDTH] are activations after `first`, `ids` [BATCH, rows] words, `lengths` [BATCH] how many of them
are no padding, `labels` [BATCH, rows] words or -100.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

BATCH, ROWS, WIDTH, HEADS, WORDS = 2, 12, 8, 2, 11


@dataclass(frozen=True)
class Case:
    """`parts` make the modules, parameters and buffers that `run` uses; `gathered` are the ops that need rows whole."""

    run: Callable[..., Any]
    parts: dict[str, Callable[[], Any]]
    rows: int = ROWS
    gathered: Collection[str] = ()


CASES: dict[str, Case] = {}


def case(
    rows: int = ROWS, gathered: Collection[str] = (), **parts: Callable[[], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        CASES[run.__name__.replace("_", " ")] = Case(run, parts, rows, gathered)
        return run

    return register


def parameter(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def heads(x: Tensor) -> list[Tensor]:
    """Queries, keys and values [B, H, S, D] of [B, S, 3 * H * D]."""
    return [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in x.chunk(3, -1)]


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(merged(F.scaled_dot_product_attention(*heads(self.qkv(self.norm(x))), is_causal=True)))


class Model(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        self.run, self.words, self.head = case.run, nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.first, self.second = Block(), Block()
        for name, make in case.parts.items():
            part = make()
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            else:
                self.register_buffer(name, part)

    def forward(self, ids: Tensor, lengths: Tensor, labels: Tensor) -> Any:
        return self.run(self, self.first(self.words(ids)), ids, lengths, labels)


def labels_loss(m: Model, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m.head(x).flatten(0, 1), labels.flatten())


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    ids, labels = torch.randint(0, WORDS, (2, BATCH, rows), generator=generator)
    labels[:, 1:3] = -100
    return ids, torch.tensor([rows - 3, rows]), labels
