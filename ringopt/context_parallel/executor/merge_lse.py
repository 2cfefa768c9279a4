"""Partial softmaxes of the same rows, merged by their log-sum-exp (as in FlashAttention and Ring Attention)."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.rows import Rows, overlap, within, without
from ringopt.hardware.devices import limits_of
from ringopt.kernels.base import HIDDEN, accumulator
from ringopt.kernels.fused import merge_parts_, usable

Pair = tuple[Tensor, Tensor]


def merge_(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Adds a partial softmax [B, H, S, Dv], [B, H, S] into `out` and `lse`, in place.

    A row hidden on both sides stays 0 and -inf; the usual sigmoid(more_lse - lse) would be NaN there.
    """
    if usable(out):
        merge_parts_(out, lse, [out, lse], [more_out], [more_lse], [0])
        return
    total = torch.logaddexp(lse, more_lse)
    weight = (more_lse - total).exp_().masked_fill_(more_lse == HIDDEN, 0.0)
    out.lerp_(more_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(total)


def add_logits_(out: Tensor, lse: Tensor, logits: Tensor) -> None:
    """One more logit of each row, that leads to no value, in place. Broadcast to [B, H, S]."""
    total = torch.logaddexp(lse, logits.to(lse.dtype))
    out *= (lse - total).exp_().masked_fill_(lse == HIDDEN, 0.0).unsqueeze(-1)
    lse.copy_(total)


def merged_of(q: Tensor, value_dim: int) -> Merged:
    """Nothing yet, of the queries `q`."""
    return MergedAtOnce(q, value_dim) if usable(q) else Merged(q, value_dim)


class Merged:
    """out and lse of the queries `q`, gathered tile by tile in accumulator(q.dtype). `sums`: what is there already."""

    def __init__(self, q: Tensor, value_dim: int, sums: Pair | None = None):
        self._q, self._value_dim, self._sums = q, value_dim, sums
        self._blank: Rows = ()  # rows of the sums to which nothing was added, nor anything written

    def of(self, heads: slice) -> Merged:
        """Some heads of it, of the same memory."""
        out, lse = self._written(range(self._q.shape[2]))
        return Merged(self._q[:, heads], self._value_dim, (out[:, heads], lse[:, heads]))

    @property
    def empty(self) -> bool:
        return self._sums is None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """The softmax of local query rows over some more keys."""
        own = range(self._q.shape[2])[rows]
        if self.empty and own == range(self._q.shape[2]) and out.dtype == accumulator(self._q.dtype):
            # The first tile, of all rows, is the sum so far. Its tensors become it, so that none are held beside them.
            self._sums = out, lse.contiguous()
            return
        sums = self._started()
        if any(within(own, blank) for blank in self._blank) and own.step == 1:
            sums[0][:, :, rows], sums[1][:, :, rows] = out, lse
            self._blank = tuple(piece for blank in self._blank for piece in without(blank, [own]))
            return
        whole_out, whole_lse = self._written(own)
        merge_(whole_out[:, :, rows], whole_lse[:, :, rows], out, lse)

    def add_logits(self, rows: slice, logits: Tensor) -> None:
        """One more logit [1|B, Hq, rows] of local query rows, that leads to no value."""
        out, lse = self._written(range(self._q.shape[2])[rows])
        add_logits_(out[:, :, rows], lse[:, :, rows], logits)

    def result(self) -> Pair:
        """out in q's dtype and lse, both contiguous."""
        out, lse = self._written(range(self._q.shape[2]))
        return out.to(self._q.dtype).contiguous(), lse

    def _started(self) -> Pair:
        if self._sums is None:
            dtype, sizes = accumulator(self._q.dtype), self._q.shape[:3]
            out = self._q.new_empty(*sizes, self._value_dim, dtype=dtype)
            self._sums, self._blank = (out, self._q.new_empty(sizes, dtype=dtype)), (range(self._q.shape[2]),)
        return self._sums

    def _written(self, rows: range) -> Pair:
        """The sums, of which none of `rows` is blank."""
        out, lse = self._started()
        for blank in self._blank:
            if overlap(blank, rows):
                own = slice(blank.start, blank.stop)
                out[:, :, own], lse[:, :, own] = 0.0, HIDDEN
        self._blank = tuple(blank for blank in self._blank if not overlap(blank, rows))
        return out, lse


class MergedAtOnce(Merged):
    """The same where several parts are merged in one launch: they wait until there are so many (Limits.merged)."""

    def __init__(self, q: Tensor, value_dim: int):
        super().__init__(q, value_dim)
        self._waiting: list[tuple[int, Tensor, Tensor]] = []  # each with the first of its rows

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        own = range(self._q.shape[2])[rows]
        if own.step > 1:
            super().add(rows, out, lse)
            return
        if len(self._waiting) == limits_of(self._q.device.type).merged:  # not sooner: the last ones leave in q's dtype
            self._started()
        self._waiting.append((own.start, out, lse))

    def result(self) -> Pair:
        if not self._waiting and self._sums is not None:
            return super().result()
        return self._merge(self._q.dtype)

    def _started(self) -> Pair:
        """The sums, with all that waited."""
        if self._waiting or self._sums is None:
            self._sums = self._merge(accumulator(self._q.dtype))
        return self._sums

    def _merge(self, dtype: torch.dtype) -> Pair:
        """In the memory of the sums, if there are any of that dtype."""
        wide, sizes, sums = accumulator(self._q.dtype), self._q.shape[:3], self._sums or ()
        if sums and sums[0].dtype == dtype:
            out, lse = sums
        else:
            out = self._q.new_empty(*sizes, self._value_dim, dtype=dtype)
            lse = self._q.new_empty(sizes, dtype=wide)
        firsts, parts, lses = zip(*self._waiting, strict=True) if self._waiting else ((), (), ())
        self._waiting = []
        merge_parts_(out, lse, sums, parts, lses, firsts)
        return out, lse
