"""A kernel that sleeps for as long as its tile would take: for more ranks than the machine has cores."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ringopt.kernels.base import Kernel, accumulator

FLOPS = 5e10  # a second: a core of a server, in float32
BACKWARD = 2.5  # times the products of the forward


class Sleeping(Kernel):
    """Takes the time of a core that does FLOPS and the processor of none; gives zeros."""

    name = "sleeping"

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> None:
        return None

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        time.sleep(seconds(q, k, causal))
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
        time.sleep(BACKWARD * seconds(q, k, causal))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def seconds(q: Tensor, k: Tensor, causal: bool) -> float:
    """Of two products, for q [B, Hq, Sq, D] and k [B, Hkv, Sk, D]; a triangle has half of the pairs."""
    pairs = q.shape[2] * (q.shape[2] + 1) / 2 if causal else q.shape[2] * k.shape[2]
    return 4 * q.shape[0] * q.shape[1] * pairs * q.shape[3] / FLOPS
