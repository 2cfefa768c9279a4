"""Attention written out in matrix products: any device and head size, and the only kernel that changes scores or drops
weights, or has gradients of what changes them.

Scores and sums are in accumulator(dtype). Rows of queries are taken a few at a time, so that the scores held at once
stay below a bound whatever the size of the tile. The gradients are those of FlashAttention (Dao et al. 2022, appendix
B): the weights are computed anew from the log-sum-exp of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.hardware.devices import limits_of
from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows, accumulator, visible_lse
from ringopt.torch_compat.autograd import recording

SEVERAL = 8  # what is done to scores or weights holds several such tensors, of up to 64 bits


@dataclass(frozen=True)
class Modifier:
    """What is done to the scaled scores of a tile before the mask is added.

    `change` takes scores [B, Hq, rows, Sk] and the rows of the tile that they are, and is recorded by autograd; the
    gradients of `learned`, which it reads, are added to `parts`.
    """

    change: Callable[[Tensor, slice], Tensor]
    learned: Sequence[Tensor] = ()
    parts: Sequence[Tensor] = ()

    def record(self, scores: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The scores as a leaf, and what they become."""
        with recording():
            leaf = scores.detach().requires_grad_()
            return leaf, self.change(leaf, rows)

    def pull_back(self, leaf: Tensor, changed: Tensor, dchanged: Tensor) -> Tensor:
        """The gradient of the scores."""
        if not changed.requires_grad:
            return torch.zeros_like(leaf)
        given = (leaf, *self.learned)
        found, *parts = torch.autograd.grad(changed, given, dchanged, allow_unused=True)
        for total, part in zip(self.parts, parts, strict=True):
            if part is not None:
                total += part
        return found if found is not None else torch.zeros_like(leaf)


class Math(Kernel):
    """`level` [1|B, 1|Hq, Sq, 1] is taken off the masked scores of each row, and so off its lse. `modifier` changes
    scores; `factor` gives for some rows of the tile what their weights [B, Hq, rows, Sk] are multiplied with, of which
    the lse knows nothing: dropout."""

    name = "math"

    def __init__(
        self,
        level: Tensor | None = None,
        modifier: Modifier | None = None,
        factor: Callable[[slice], Tensor] | None = None,
    ):
        self.level, self.modifier, self.factor = level, modifier, factor

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if dtype.is_floating_point and dtype.itemsize >= 2:
            return None
        return Refusal(f"kernel math has no {dtype}: attention is for floating point of 16 bits or more")

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, wide, groups = tile.q, accumulator(tile.q.dtype), tile.groups
        k, v = tile.k.to(wide), tile.v.to(wide)
        out = q.new_empty(*q.shape[:3], v.shape[3], dtype=wide)
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for rows in self._row_chunks(q, k):
            scores = products(q, k, tile.scale, rows)
            if self.modifier is not None:
                scores = self.modifier.change(scores, rows)
            scores = self._masked(scores, tile, rows)
            lse[:, :, rows] = scores.logsumexp(-1)
            weights = scores.sub_(visible_lse(lse[:, :, rows]).unsqueeze(-1)).exp_()
            if self.factor is not None:
                weights *= self.factor(rows)
            out[:, :, rows] = unfold(fold(weights, groups) @ v, groups)
        return out, lse

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        return self._gradients(tile, rows, None)

    def backward_with_mask(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As `backward` of a tile that is not empty and has a mask, and the gradient of that, in its shape."""
        assert tile.mask is not None
        dmask = torch.zeros(tile.mask.shape, dtype=accumulator(tile.q.dtype), device=tile.q.device)
        return *self._gradients(tile, rows.visible(), dmask), dmask

    def _gradients(self, tile: TileInputs, whole: WholeRows, dmask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, wide, groups = tile.q, accumulator(tile.q.dtype), tile.groups
        k, v = tile.k.to(wide), tile.v.to(wide)
        dq, dk, dv = q.new_empty(q.shape, dtype=wide), torch.zeros_like(k), torch.zeros_like(v)
        for rows in self._row_chunks(q, k):
            scores = products(q, k, tile.scale, rows)
            leaf, changed = self.modifier.record(scores, rows) if self.modifier else (scores, scores)
            weights = self._masked(changed.detach(), tile, rows).sub_(whole.lse[:, :, rows].unsqueeze(-1)).exp_()
            factor = self.factor(rows) if self.factor is not None else None
            grad = whole.dout[:, :, rows].to(wide)
            dot = (grad * whole.out[:, :, rows]).sum(-1, keepdim=True)
            grad = fold(grad, groups)
            dv += fold(weights if factor is None else weights * factor, groups).mT @ grad
            dscores = unfold(grad @ v.mT, groups)
            if factor is not None:
                dscores *= factor
            dscores.sub_(dot).mul_(weights)
            if dmask is not None:
                dmask[:, :, rows] += reduced(dscores, dmask.shape)
            if self.modifier is not None:
                dscores = self.modifier.pull_back(leaf, changed, dscores)
            dscores = fold(dscores * tile.scale, groups)
            dq[:, :, rows] = unfold(dscores @ k, groups)
            dk += dscores.mT @ fold(q[:, :, rows].to(wide), groups)
        return dq, dk, dv

    def _masked(self, scores: Tensor, tile: TileInputs, rows: slice) -> Tensor:
        """Of some query rows, in place unless they were changed: autograd may have kept those."""
        mask = tile.mask
        if self.modifier is not None:
            scores = scores.clone()
        if mask is not None:
            scores += mask[:, :, rows]
            if self.modifier is not None:  # a function may be infinite where it is hidden, and inf - inf is no number
                scores.masked_fill_(mask[:, :, rows] == HIDDEN, HIDDEN)
        if self.level is not None:
            scores -= self.level[:, :, rows]
        if tile.causal:
            queries = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
            scores.masked_fill_(torch.arange(scores.shape[3], device=scores.device) > queries, HIDDEN)
        return scores

    def _row_chunks(self, q: Tensor, k: Tensor) -> Iterator[slice]:
        held = 1 if self.modifier is None and self.factor is None else SEVERAL
        elements = limits_of(q.device.type).scores
        step = max(1, elements // (held * q.shape[0] * q.shape[1] * k.shape[2]))
        for first in range(0, q.shape[2], step):
            yield slice(first, min(first + step, q.shape[2]))


def products(q: Tensor, k: Tensor, scale: float, rows: slice) -> Tensor:
    """Scaled scores [B, Hq, rows, Sk] of some query rows, in the dtype of `k`."""
    groups = q.shape[1] // k.shape[1]
    return unfold(fold(q[:, :, rows].to(k.dtype), groups) @ k.mT, groups).mul_(scale)


def fold(x: Tensor, groups: int) -> Tensor:
    """[B, Hkv * groups, S, D] -> [B, Hkv, groups * S, D]: the query heads of one KV head share a matrix product."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, heads // groups, groups * rows, dim)


def unfold(x: Tensor, groups: int) -> Tensor:
    """The inverse of `fold`."""
    batch, kv_heads, rows, dim = x.shape
    return x.reshape(batch, kv_heads * groups, rows // groups, dim)


def reduced(x: Tensor, shape: torch.Size) -> Tensor:
    """Summed over batch and heads where `shape` has 1."""
    dims = [dim for dim in (0, 1) if shape[dim] == 1]
    return x.sum(dims, keepdim=True) if dims else x
