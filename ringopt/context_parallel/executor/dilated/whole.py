"""The segments of dilated attention that are whole on a rank: they wait for no message, and those of one length are
computed in one call of the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringopt.context_parallel.executor.dilated.operands import (
    DilatedAttention,
    Operands,
    Saved,
    additive,
    dropout_of,
)
from ringopt.context_parallel.executor.dilated.views import (
    batched,
    collected,
    expand_kv_heads,
    in_segments,
    of_heads,
    unbatched,
    views,
)
from ringopt.context_parallel.executor.merge_lse import merge_
from ringopt.context_parallel.plan.dilated import Stretch, TermPlan
from ringopt.kernels.base import TileInputs, WholeRows, accumulator
from ringopt.kernels.math import Math


def wholes(attention: DilatedAttention, rank: int, given: Operands) -> Iterator[Whole]:
    """The segments that `rank` holds entirely, of every term: a batch for each length."""
    for part in attention.plan.terms:
        for stretch in part.whole(rank):
            yield Whole(attention, part, stretch, given)


class Whole:
    """The segments of one stretch, as a batch."""

    def __init__(self, attention: DilatedAttention, part: TermPlan, stretch: Stretch, given: Operands):
        self.attention, self.part, self.term, self.stretch = attention, part, part.term, stretch
        self.kernel = attention.kernel
        if attention.dropout_p > 0:
            dropout, segments, batch = dropout_of(attention, given), self._rows(), given.q.shape[0]

            def factor(rows: slice) -> Tensor:
                heads, wide = part.term.heads, accumulator(given.q.dtype)
                parts = [dropout.factor(batch, heads, keys[rows], keys, wide) for keys in segments]
                return torch.stack(parts, 1).flatten(0, 1)

            self.kernel = Math(factor=factor)
        q, mask = self._cut(given.q, self.term.heads), None
        k, v = (expand_kv_heads(self._cut(x, self.term.kv_heads), self.term) for x in (given.k, given.v))
        if given.seen is not None:
            seen = in_segments(given.seen[:, None], stretch.first, stretch, self.term.kept)
            mask = additive(batched(seen)[:, 0], q)
        self.tile = TileInputs(q, k, v, attention.scale, mask, attention.causal)

    def forward(self) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(self.tile)
        zeros = self.attention.zero_keys(self.term.kept, self.tile.q.shape[2])
        return with_zero_keys(out, lse, zeros) if zeros else (out, lse)

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        into = (self._segments(of_heads(x, self.term.heads)) for x in (out, lse))
        merge_(*into, *(unbatched(x, out.shape[0]) for x in self.forward()))

    def add_gradients(self, dout: Tensor, saved: Saved, totals: Sequence[Tensor]) -> None:
        attention, term = self.attention, self.term
        own = attention.plan.dilation.torchscale_mixing
        out = self.forward()[0] if own else self._cut(saved.out, term.heads)
        dout, lse = (self._cut(x, term.heads) for x in (dout, saved.lse))
        dq, dk, dv = self.kernel.backward(self.tile, WholeRows(dout, out.to(dout.dtype), lse))
        parts = (dq, collected(dk, term), collected(dv, term))
        for total, heads, found in zip(totals, (term.heads, term.kv_heads, term.kv_heads), parts, strict=True):
            for of, view in views(total, heads):
                self._segments(view).add_(unbatched(found, total.shape[0])[:, of])

    def _rows(self) -> list[range]:
        """Of the whole sequence, that each segment keeps."""
        first, length, kept = self.stretch.first, self.stretch.length, self.term.kept
        starts = range(first, first + self.stretch.rows, length)
        return [range(start + kept.offset, start + length, kept.rate) for start in starts]

    def _segments(self, x: Tensor) -> Tensor:
        return in_segments(x, self.stretch.here, self.stretch, self.term.kept)

    def _cut(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        """[B * segments, heads, kept rows, ...] of [B, H, S_local, ...]."""
        return batched(self._segments(of_heads(x, heads)))


def with_zero_keys(out: Tensor, lse: Tensor, zeros: int) -> tuple[Tensor, Tensor]:
    """`zeros` more keys whose scores and values are 0: one logit that leads to no value."""
    total = torch.logaddexp(lse, lse.new_full((), math.log(zeros)))
    return out * (lse - total).exp().unsqueeze(-1), total
