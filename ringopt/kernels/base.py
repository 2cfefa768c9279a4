"""What a kernel is: attention over one tile, with the log-sum-exp that lets tiles be merged.

Shapes: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] with Hq a multiple of Hkv (query head h attends with KV
head h // (Hq / Hkv)), mask [1|B, 1|Hq, Sq, Sk] additive, lse [B, Hq, Sq] in natural log. A row that sees nothing has
out 0, lse -inf and gradients 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal

HIDDEN = float("-inf")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What sums over tiles are kept in: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TileInputs:
    """Attention of the queries of a tile to its keys. `causal` (the lower triangle) only for Sq == Sk: kernels do not
    agree on what it means otherwise. `band`: query i sees the keys j with band[0] <= j - i < band[1], one at least; for
    kernels that take such tiles, without a mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Tensor | None = None
    causal: bool = False
    band: tuple[int, int] | None = None

    @property
    def empty(self) -> bool:
        return not (self.q.numel() and self.k.numel())

    @property
    def groups(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[1] // self.k.shape[1]


@dataclass(frozen=True)
class WholeRows:
    """What a backward needs of the queries of a tile, over the keys of all tiles: the gradient of the output, the
    output and its log-sum-exp. `clear`: that is `visible_lse` already."""

    dout: Tensor
    out: Tensor
    lse: Tensor
    clear: bool = field(default=False, kw_only=True)

    def visible(self) -> WholeRows:
        return self if self.clear else replace(self, lse=visible_lse(self.lse), clear=True)


class Kernel(ABC):
    """`forward` and `backward` take any tile; subclasses need only handle those that are not empty."""

    name: ClassVar[str]
    masks: ClassVar[bool] = True  # whether it takes them

    @abstractmethod
    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        """None, or why heads of these sizes cannot be computed here."""

    def preferred(self, device: torch.device) -> bool:
        """Whether it comes first on a `device` that it supports, whatever the order of kernels is."""
        return False

    @property
    def bands(self) -> bool:
        """Whether it takes tiles of a band, without a mask in memory."""
        return False

    def takes(self, tile: TileInputs) -> bool:
        """Whether it computes such a tile, of heads that it supports."""
        return (self.masks or tile.mask is None) and (self.bands or tile.band is None)

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        """out [B, Hq, Sq, Dv] in q's dtype or wider, lse [B, Hq, Sq] in accumulator(q.dtype)."""
        self._check(tile)
        q, v = tile.q, tile.v
        if tile.empty:
            lse = q.new_full(q.shape[:3], HIDDEN, dtype=accumulator(q.dtype))
            return q.new_zeros(*q.shape[:3], v.shape[3]), lse
        return self._forward(tile)

    def backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of this tile, in q's dtype or wider."""
        self._check(tile)
        if tile.empty:
            return torch.zeros_like(tile.q), torch.zeros_like(tile.k), torch.zeros_like(tile.v)
        return self._backward(tile, rows.visible())

    def _check(self, tile: TileInputs) -> None:
        queries, keys = tile.q.shape[2], tile.k.shape[2]
        if tile.causal and queries != keys:
            raise ValueError(f"a causal tile is square; found {queries} queries and {keys} keys")
        if tile.band is not None and not self.bands:
            raise ValueError(f"kernel {self.name} takes no tiles of a band")

    @abstractmethod
    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]: ...


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
