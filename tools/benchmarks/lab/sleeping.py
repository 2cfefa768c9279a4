"""Kernels that compute nothing; one sleeps as long as a tile would take: for more ranks than the machine has cores."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ringopt.kernels.base import Kernel, TileInputs, WholeRows, accumulator

# A second. So few, and with the link's rate made for them, that who moves the bytes needs next to nothing of the cores,
# as beside a GPU: where ranks are more than cores, a faster one's sums and messages get in each other's way.
FLOPS = 5e9
BACKWARD = 2.5  # times the products of the forward


class Idle(Kernel, ABC):
    """Computes nothing: spends what a tile costs, and gives zeros."""

    @abstractmethod
    def spend(self, tile: TileInputs, backward: bool) -> None: ...

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> None:
        return None

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        self.spend(tile, False)
        q, v = tile.q, tile.v
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        self.spend(tile, True)
        return torch.zeros_like(tile.q), torch.zeros_like(tile.k), torch.zeros_like(tile.v)


class Sleeping(Idle):
    """Takes the time of a processor that does FLOPS and itself none."""

    name = "sleeping"

    def spend(self, tile: TileInputs, backward: bool) -> None:
        time.sleep(4 * pairs(tile) * tile.q.shape[3] / FLOPS * (BACKWARD if backward else 1))


def pairs(tile: TileInputs) -> float:
    """Of queries and keys, in all heads; a triangle has half of them."""
    batch, heads, queries, _ = tile.q.shape
    return batch * heads * (queries * (queries + 1) / 2 if tile.causal else queries * tile.k.shape[2])
