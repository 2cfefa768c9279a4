"""Attention written out in matrix products: any device and head size, and the only kernel with a gradient of the mask.

Scores and sums are in accumulator(dtype). Rows of queries are taken a few at a time, so that the scores held at once
stay below a bound whatever the size of the tile. The gradients are those of FlashAttention (Dao et al. 2022, appendix
B): the weights are computed anew from the log-sum-exp of the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ringopt.graph.refusal import Refusal
from ringopt.kernels.base import HIDDEN, Kernel, accumulator, visible_lse

SCORES = 1 << 22  # elements of [B, Hq, rows, Sk] held at once: 16 MiB in float32


class Math(Kernel):
    """`level` [1|B, 1|Hq, Sq, 1] is taken off the masked scores of each row, and so off its lse."""

    name = "math"

    def __init__(self, level: Tensor | None = None):
        self.level = level

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if dtype.is_floating_point and dtype.itemsize >= 2:
            return None
        return Refusal(f"kernel math has no {dtype}: attention is for floating point of 16 bits or more")

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        wide, groups = accumulator(q.dtype), q.shape[1] // k.shape[1]
        k, v = k.to(wide), v.to(wide)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for rows in row_chunks(q, k):
            scores = self._scores(q, k, mask, causal, scale, rows)
            lse[:, :, rows] = scores.logsumexp(-1)
            weights = scores.sub_(visible_lse(lse[:, :, rows]).unsqueeze(-1)).exp_()
            out[:, :, rows] = spread(fold(weights, groups) @ v, groups)
        return out, lse

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
        return self._gradients(dout, q, k, v, out, lse, mask, causal, scale, None)

    def backward_with_mask(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `backward` of a tile that is not empty, and the gradient of `mask`, in its shape."""
        dmask = torch.zeros(mask.shape, dtype=accumulator(q.dtype), device=q.device)
        return *self._gradients(dout, q, k, v, out, visible_lse(lse), mask, causal, scale, dmask), dmask

    def _gradients(
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
        dmask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, groups = accumulator(q.dtype), q.shape[1] // k.shape[1]
        k, v = k.to(wide), v.to(wide)
        dq, dk, dv = q.new_empty(q.shape, dtype=wide), torch.zeros_like(k), torch.zeros_like(v)
        for rows in row_chunks(q, k):
            weights = self._scores(q, k, mask, causal, scale, rows).sub_(lse[:, :, rows].unsqueeze(-1)).exp_()
            grad = dout[:, :, rows].to(wide)
            dot = (grad * out[:, :, rows]).sum(-1, keepdim=True)
            weights, grad = fold(weights, groups), fold(grad, groups)
            dv += weights.mT @ grad
            dscores = (grad @ v.mT).sub_(fold(dot, groups)).mul_(weights)
            if dmask is not None:
                dmask[:, :, rows] += reduced(spread(dscores, groups), dmask.shape)
            dscores.mul_(scale)
            dq[:, :, rows] = spread(dscores @ k, groups)
            dk += dscores.mT @ fold(q[:, :, rows].to(wide), groups)
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice) -> Tensor:
        """Masked scores [B, Hq, rows, Sk] of some query rows; `k` is in the accumulator's dtype already."""
        groups = q.shape[1] // k.shape[1]
        scores = spread(fold(q[:, :, rows].to(k.dtype), groups) @ k.mT, groups).mul_(scale)
        if mask is not None:
            scores += mask[:, :, rows]
        if self.level is not None:
            scores -= self.level[:, :, rows]
        if causal:
            queries = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            scores.masked_fill_(torch.arange(k.shape[2], device=q.device) > queries, HIDDEN)
        return scores


def row_chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    step = max(1, SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], step):
        yield slice(first, min(first + step, q.shape[2]))


def fold(x: Tensor, groups: int) -> Tensor:
    """[B, Hkv * groups, S, D] -> [B, Hkv, groups * S, D]: the query heads of one KV head share a matrix product."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, heads // groups, groups * rows, dim)


def spread(x: Tensor, groups: int) -> Tensor:
    """The inverse of `fold`."""
    batch, kv_heads, rows, dim = x.shape
    return x.reshape(batch, kv_heads * groups, rows // groups, dim)


def reduced(x: Tensor, shape: torch.Size) -> Tensor:
    """Summed over batch and heads where `shape` has 1."""
    dims = [dim for dim in (0, 1) if shape[dim] == 1]
    return x.sum(dims, keepdim=True) if dims else x
