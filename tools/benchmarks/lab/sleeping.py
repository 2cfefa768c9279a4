"""Kernels that compute nothing; one sleeps as long as a tile would take: for more ranks than the machine has cores."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ringopt.kernels.base import Kernel, accumulator

# A second. So few, and with the link's rate made for them, that who moves the bytes needs next to nothing of the cores,
# as beside a GPU: where ranks are more than cores, a faster one's sums and messages get in each other's way.
FLOPS = 5e9
BACKWARD = 2.5  # times the products of the forward


class Idle(Kernel, ABC):
    """Computes nothing: spends what a tile costs, and gives zeros."""

    @abstractmethod
    def spend(self, q: Tensor, k: Tensor, causal: bool, backward: bool) -> None: ...

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> None:
        return None

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        self.spend(q, k, causal, False)
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=accumulator(q.dtype))

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.spend(q, k, causal, True)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


class Sleeping(Idle):
    """Takes the time of a processor that does FLOPS and itself none."""

    name = "sleeping"

    def spend(self, q: Tensor, k: Tensor, causal: bool, backward: bool) -> None:
        time.sleep(4 * pairs(q, k, causal) * q.shape[3] / FLOPS * (BACKWARD if backward else 1))


def pairs(q: Tensor, k: Tensor, causal: bool) -> float:
    """Of queries and keys, for q [B, Hq, Sq, D] and k [B, Hkv, Sk, D], in all heads; a triangle has half of them."""
    queries, keys = q.shape[2], k.shape[2]
    return q.shape[0] * q.shape[1] * (queries * (queries + 1) / 2 if causal else queries * keys)
