"""What a kernel is: attention over one tile, with the log-sum-exp that lets tiles be merged.

Shapes: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] with Hq a multiple of Hkv (query head h attends with KV
head h // (Hq / Hkv)), mask [1|B, 1|Hq, Sq, Sk] additive, lse [B, Hq, Sq] in natural log. A row that sees nothing has
out 0, lse -inf and gradients 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal

HIDDEN = float("-inf")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums over tiles are kept in: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Kernel(ABC):
    """`forward` and `backward` take any tile; subclasses need only handle those that are not empty."""

    name: ClassVar[str]
    masks: ClassVar[bool] = True  # whether it takes them

    @abstractmethod
    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        """None, or why heads of these sizes cannot be computed here."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [B, Hq, Sq, Dv] in q's dtype or wider, lse [B, Hq, Sq] in accumulator(q.dtype).

        `causal` (the lower triangle) only for Sq == Sk: kernels do not agree on what it means otherwise.
        """
        _check_causal(q, k, causal)
        if not (q.numel() and k.numel()):
            lse = q.new_full(q.shape[:3], HIDDEN, dtype=accumulator(q.dtype))
            return q.new_zeros(*q.shape[:3], v.shape[3]), lse
        return self._forward(q, k, v, mask, causal, scale)

    def backward(
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
        """dq, dk, dv of this tile, in q's dtype or wider. `out` and `lse` are those of whole rows, over all tiles."""
        _check_causal(q, k, causal)
        if not (q.numel() and k.numel()):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        return self._backward(dout, q, k, v, out, visible_lse(lse), mask, causal, scale)

    @abstractmethod
    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
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
    ) -> tuple[Tensor, Tensor, Tensor]: ...


def visible_lse(lse: Tensor) -> Tensor:
    """0 for rows that see nothing: their scores are all -inf, and exp(-inf - lse) is then 0 instead of NaN."""
    return lse.masked_fill(lse == HIDDEN, 0.0).contiguous()


def hidden_rows(mask: Tensor, causal: bool) -> Tensor:
    """[1|B, 1|Hq, Sq], or 1 in place of Sq: the rows for which every key is hidden."""
    if mask.stride(2) == 0:  # one row of keys, expanded to all queries: no more is made of it
        keys = mask[:, :, 0]
        return (keys.cummax(-1).values if causal else keys.amax(-1, keepdim=True)) == HIDDEN
    if causal:
        mask = mask.masked_fill(~torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril(), HIDDEN)
    return mask.amax(-1) == HIDDEN


def _check_causal(q: Tensor, k: Tensor, causal: bool) -> None:
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"a causal tile is square; found {q.shape[2]} queries and {k.shape[2]} keys")
