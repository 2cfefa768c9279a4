"""Runs dilated attention on one rank, forward and backward.

    all terms together, for each step:  post messages | compute while they travel | wait | keep what came

Segments that are whole on this rank are computed under the first messages, as many in one call of the kernel as a term
has of one length; segments that are cut follow the plan of their exchange. Each term gives a partial softmax of the
rows it keeps. They merge by log-sum-exp, and backward each needs nothing but the output and the log-sum-exp of all.

Weights are dropped by the place of query and key in the sequence (dropout.py), so a pair of two patterns is dropped in
both or in none. A sink is one more logit in the softmax of all terms.

torchscale's mixing, which is for models trained with it, holds the weights of the terms constant: the backward of a
term then sees its own output in place of that of all. That output is computed anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, KVShape, Packed
from ringopt.context_parallel.executor.dilated_start import Begun, Keys, post_all
from ringopt.context_parallel.executor.dilated_views import (
    batched,
    collected,
    in_segments,
    of_heads,
    places,
    spread,
    unbatched,
    views,
)
from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.executor.merge_lse import Merged, add_logits_, merge_
from ringopt.context_parallel.geometry.dilation import Kept
from ringopt.context_parallel.geometry.local_segments import Segments
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.plan.dilated import DilatedPlan, Stretch, TermPlan
from ringopt.context_parallel.plan.exchange import Block, Cargo, Message
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.traffic import log_event
from ringopt.kernels.base import HIDDEN, Kernel, accumulator
from ringopt.kernels.math import Math


@dataclass(frozen=True)
class DilatedAttention:
    """What is computed, and by which plan and kernel."""

    plan: DilatedPlan
    kernel: Kernel
    scale: float
    dropout_p: float = 0.0

    @property
    def causal(self) -> bool:
        return self.plan.dilation.causal

    def zero_keys(self, kept: Kept, rows: int) -> int:
        """Keys of zeros that torchscale adds to a segment that keeps `rows` rows."""
        adds = self.plan.dilation.torchscale_mixing and not self.causal
        return kept.padded - rows if adds else 0


@dataclass(frozen=True)
class Operands:
    """The rank's rows, as the layout gives them: q [B, Hq, S_local, D], k [B, Hkv, S_local, D], v [B, Hkv, S_local,
    Dv]. `seen` [B, S]: which keys of the whole sequence are no padding. `sinks` [1|B, Hq] and `seed` as in ring
    attention (keys_move.py)."""

    q: Tensor
    k: Tensor
    v: Tensor
    seen: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward."""

    given: Operands
    out: Tensor
    lse: Tensor


def attend_dilated(
    attention: DilatedAttention, mesh: Mesh, given: Operands, begun: Begun | None = None
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, S_local, Dv] in q's dtype and lse [B, Hq, S_local], both contiguous. A place that no term keeps, and
    a row that sees padding only, is 0 with lse -inf. Raises RingCommError."""
    q, wide = given.q, accumulator(given.q.dtype)
    out = q.new_zeros(*q.shape[:3], given.v.shape[3], dtype=wide)
    lse = q.new_full(q.shape[:3], HIDDEN, dtype=wide)
    cuts = [Cut(attention, part, mesh.rank, given) for part in attention.plan.terms if part.exchange is not None]

    def alone() -> None:
        for whole in wholes(attention, mesh.rank, given):
            whole.merge_into(out, lse)
            mesh.attend()

    in_lockstep(mesh, cuts, "forward", alone, begun)
    for cut in cuts:
        cut.merge_into(out, lse)
    if given.sinks is not None:
        add_logits_(out, lse, given.sinks.unsqueeze(-1))
    return out.to(q.dtype), lse


def attend_dilated_backward(
    attention: DilatedAttention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Begun | None = None
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv of the rank's rows, complete, and this rank's part of the gradient of the sinks, if there are some. K
    and V travel again, and sums of dK and dV travel home in the accumulator's dtype. Raises RingCommError."""
    given, parts = saved.given, [part for part in attention.plan.terms if part.exchange is not None]
    operands = (given.q, given.k, given.v)
    totals = tuple(torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in operands)
    outs: list[Tensor | None] = [None] * len(parts)
    if attention.plan.dilation.torchscale_mixing:
        again = [Cut(attention, part, mesh.rank, given) for part in parts]
        in_lockstep(mesh, again, "forward again", lambda: None, begun)
        outs, begun = [cut.result()[0] for cut in again], None
    cuts = [CutBackward(attention, part, mesh.rank, dout, saved, out) for part, out in zip(parts, outs, strict=True)]

    def alone() -> None:
        for whole in wholes(attention, mesh.rank, given):
            whole.add_gradients(dout, saved, totals)
            mesh.attend()

    in_lockstep(mesh, cuts, "backward", alone, begun)
    for cut in cuts:
        cut.add_gradients(totals)
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(totals, operands, strict=True))
    return dq, dk, dv, [] if given.sinks is None else [gradient_of_sinks(dout, saved, given.sinks)]


def in_lockstep(
    mesh: Mesh, cuts: Sequence[Cut], label: str, alone: Callable[[], None], begun: Begun | None = None
) -> None:
    """The exchanges of all terms, a step of each at a time, so that what a step sends is under way at once. `alone` is
    computed under the first, which may have `begun`."""
    for number in range(max([1, *(len(cut.steps) for cut in cuts)])):
        if number == 0 and begun is not None:
            posted = begun
            for cut, arriving in zip(cuts, begun.arriving, strict=True):
                cut.arriving = arriving
        else:
            posted = post_all(mesh, cuts, number, label)
        if number == 0:
            alone()
        for cut in cuts:
            for _tile in cut.compute(number):
                mesh.attend()
        log_event("computed", f"{label} {number}", mesh.rank)
        posted.pending.wait()
        for cut in cuts:
            cut.end(number)


def wholes(attention: DilatedAttention, rank: int, given: Operands) -> Iterator[Whole]:
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
        self.q = self._cut(given.q, self.term.heads)
        self.k, self.v = (spread(self._cut(x, self.term.kv_heads), self.term) for x in (given.k, given.v))
        self.mask = None
        if given.seen is not None:
            seen = in_segments(given.seen[:, None], stretch.first, stretch, self.term.kept)
            self.mask = additive(batched(seen)[:, 0], self.q)

    def forward(self) -> tuple[Tensor, Tensor]:
        attention = self.attention
        out, lse = self.kernel.forward(self.q, self.k, self.v, self.mask, attention.causal, attention.scale)
        zeros = attention.zero_keys(self.term.kept, self.q.shape[2])
        return with_zero_keys(out, lse, zeros) if zeros else (out, lse)

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        into = (self._segments(of_heads(x, self.term.heads)) for x in (out, lse))
        merge_(*into, *(unbatched(x, out.shape[0]) for x in self.forward()))

    def add_gradients(self, dout: Tensor, saved: Saved, totals: Sequence[Tensor]) -> None:
        attention, term = self.attention, self.term
        own = attention.plan.dilation.torchscale_mixing
        out = self.forward()[0] if own else self._cut(saved.out, term.heads)
        dout, lse = (self._cut(x, term.heads) for x in (dout, saved.lse))
        dq, dk, dv = self.kernel.backward(
            dout, self.q, self.k, self.v, out.to(dout.dtype), lse, self.mask, attention.causal, attention.scale
        )
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


class Cut(Keys):
    """The segments of one term that lie across edges of the shards, attended."""

    def __init__(self, attention: DilatedAttention, part: TermPlan, rank: int, given: Operands):
        super().__init__(part, rank, given.k, given.v)
        self.attention, self.given = attention, given
        self.q = self._packed(given.q, self.term.heads)
        self.merged = Merged(self.q, self.v.shape[3])
        self.seen = None if given.seen is None else seen_of(given.seen, part)

    def compute(self, number: int) -> Iterator[None]:
        """Stops behind every tile."""
        for block in self._step(number).blocks:
            rows, keys, values, mask, causal = self._tile(block)
            how = (mask, causal, self.attention.scale)
            self.merged.add(rows, *self._kernel(block).forward(self.q[:, :, rows], keys, values, *how))
            yield

    def result(self) -> tuple[Tensor, Tensor]:
        """The partial softmax of this term: [B, heads, rows of the pieces, Dv] and [B, heads, rows of the pieces]."""
        for rows in self.exchange.q_pieces(self.rank):
            zeros = self.attention.zero_keys(self.term.kept, len(self._segment(rows)))
            if zeros:
                logits = self.q.new_full((1, len(self.term.heads), len(rows)), math.log(zeros))
                self.merged.add_logits(self.local.slice(rows), logits)
        return self.merged.result()

    def merge_into(self, out: Tensor, lse: Tensor) -> None:
        found = self.result()
        for piece, place in places(self.pieces):
            into = (of_heads(x, self.term.heads)[:, :, piece.here] for x in (out, lse))
            merge_(*into, *(x[:, :, place] for x in found))

    def _segment(self, rows: range) -> range:
        pattern = self.exchange.pattern
        assert isinstance(pattern, Segments)
        return pattern.segment(rows.start)

    def _kernel(self, block: Block) -> Kernel:
        if self.attention.dropout_p == 0:
            return self.attention.kernel
        dropout, (batch, *_), wide = dropout_of(self.attention, self.given), self.q.shape, accumulator(self.q.dtype)
        queries, keys = self.part.rows(block.queries), self.part.rows(block.keys)
        return Math(factor=lambda rows: dropout.factor(batch, self.term.heads, queries[rows], keys, wide))

    def _tile(self, block: Block) -> tuple[slice, Tensor, Tensor, Tensor | None, bool]:
        """Of a block: its query rows in `q`, keys, values, mask, and whether it is a triangle."""
        rows = self.local.slice(block.queries)
        keys, values = (spread(x, self.term) for x in self.held.pair(block.keys))
        seen = None if self.seen is None else self.seen[:, block.keys.start : block.keys.stop]
        mask = None if seen is None else additive(seen, self.q[:, :, rows])
        return rows, keys, values, mask, block.kind is Kind.CAUSAL


class CutBackward(Cut):
    """The same backward. `own`: the output of this term alone, where weights of terms are constants."""

    def __init__(
        self,
        attention: DilatedAttention,
        part: TermPlan,
        rank: int,
        dout: Tensor,
        saved: Saved,
        own: Tensor | None,
    ):
        super().__init__(attention, part, rank, saved.given)
        self.steps = self.exchange.backward(rank)
        self.dout, self.lse = (self._packed(x, self.term.heads) for x in (dout, saved.lse))
        self.out = self._packed(saved.out, self.term.heads) if own is None else own
        self.dq = torch.zeros(self.q.shape, dtype=accumulator(self.q.dtype), device=self.q.device)
        leaving = [message for step in self.steps for message in step.sends if message.cargo is Cargo.BACK]
        shape = KVShape.of(self.k, self.v, accumulator(self.k.dtype))
        own_rows = self.exchange.kv_pieces(rank)
        self.gradients = Gradients(shape, own_rows, self.local, self.k.shape[2], leaving)

    def compute(self, number: int) -> Iterator[None]:
        for block in self._step(number).blocks:
            rows, keys, values, mask, causal = self._tile(block)
            dout, q, out, lse = (x[:, :, rows] for x in (self.dout, self.q, self.out, self.lse))
            dq, dk, dv = self._kernel(block).backward(
                dout, q, keys, values, out, lse, mask, causal, self.attention.scale
            )
            self.dq[:, :, rows] += dq
            self.gradients.add(block.keys, collected(dk, self.term), collected(dv, self.term))
            yield

    def add_gradients(self, totals: Sequence[Tensor]) -> None:
        of = (self.term.heads, self.term.kv_heads, self.term.kv_heads)
        for total, heads, found in zip(totals, of, (self.dq, *self.gradients.home()), strict=True):
            for these, view in views(total, heads):
                for piece, place in places(self.pieces):
                    view[:, :, piece.here] += found[:, these, place]

    def _shape(self, message: Message) -> KVShape:
        return self.held.shape if message.cargo is Cargo.OUT else self.gradients.shape

    def _outgoing(self, message: Message) -> Tensor:
        return self.held.take(message) if message.cargo is Cargo.OUT else self.gradients.take(message)

    def _keep(self, message: Message, buffer: Packed) -> None:
        if message.cargo is Cargo.OUT:
            self.held.put(buffer)
        else:
            self.gradients.arrived(buffer)


def dropout_of(attention: DilatedAttention, given: Operands) -> Dropout:
    if given.seed is None:
        raise ValueError(f"dropout_p is {attention.dropout_p}, and there is no seed to draw from")
    return Dropout(attention.dropout_p, given.seed.to(given.q.device))


def gradient_of_sinks(dout: Tensor, saved: Saved, sinks: Tensor) -> Tensor:
    """In the shape of `sinks`: the weight of a sink leads to 0, not to the row's output."""
    weights = (sinks.to(saved.lse.dtype).unsqueeze(-1) - saved.lse).exp_().masked_fill_(saved.lse == HIDDEN, 0.0)
    found: Tensor = -(weights * (dout.to(weights.dtype) * saved.out).sum(-1)).sum(-1)
    return found.sum_to_size(sinks.shape).to(sinks.dtype)


def with_zero_keys(out: Tensor, lse: Tensor, zeros: int) -> tuple[Tensor, Tensor]:
    """`zeros` more keys whose scores and values are 0: one logit that leads to no value."""
    total = torch.logaddexp(lse, lse.new_full((), math.log(zeros)))
    return out * (lse - total).exp().unsqueeze(-1), total


def seen_of(seen: Tensor, part: TermPlan) -> Tensor:
    """[B, S] -> [B, rows that are exchanged]."""
    kept = (part.term.kept.rows(number) for number in part.cut)
    return torch.cat([seen[:, rows.start : rows.stop : rows.step] for rows in kept], 1)


def additive(seen: Tensor, q: Tensor) -> Tensor | None:
    """[B, 1, queries, keys] of [B, keys], a view that is one row of keys; None where all are seen."""
    if bool(seen.all()):
        return None
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, HIDDEN)
    return mask[:, None, None].expand(-1, 1, q.shape[2], -1)
