"""Tasks of dilated attention: the segments of one term that lie across edges of the shards. The kept rows alone travel,
as K and V of any plan do (keys_move.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local
from ringopt.context_parallel.executor.dilated.operands import (
    DilatedAttention,
    Operands,
    Saved,
    additive,
    dropout_of,
)
from ringopt.context_parallel.executor.dilated.views import (
    collected,
    expand_kv_heads,
    of_heads,
    packed,
    packed_places,
    views,
)
from ringopt.context_parallel.executor.loop import Task, leaving
from ringopt.context_parallel.executor.merge_lse import merge_, merged_of
from ringopt.context_parallel.geometry.local_segments import Segments
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.plan.dilated import Piece, TermPlan
from ringopt.context_parallel.plan.exchange import Block, Step
from ringopt.distributed.mesh import Mesh
from ringopt.kernels.base import Kernel, TileInputs, WholeRows, accumulator
from ringopt.kernels.math import Math


class TermKeys:
    """K and V of these segments on one rank: `k` and `v` [B, heads of the term, rows of the pieces, D or Dv], and in
    `held` what has come of other ranks. All that the first messages take."""

    def __init__(self, part: TermPlan, rank: int, k: Tensor, v: Tensor, backward: bool):
        assert part.exchange is not None
        self.part, self.term, self.exchange, self.rank = part, part.term, part.exchange, rank
        self.pieces: tuple[Piece, ...] = part.pieces(rank)
        self.steps: Sequence[Step] = self.exchange.steps(rank, backward)
        self.local = Local(self.exchange.q_layout.ranges(rank))
        self.k, self.v = (self._packed(x, self.term.kv_heads) for x in (k, v))
        shape = KVShape.of(self.k, self.v)
        self.held = Held(shape, self.exchange.kv_pieces(rank), self.local, self.k, self.v)

    def _packed(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return packed(of_heads(x, heads), self.pieces)


class CutForward(TermKeys, Task):
    """out and lse of these segments, merged in `merged`."""

    def __init__(
        self, attention: DilatedAttention, part: TermPlan, mesh: Mesh, given: Operands, backward: bool = False
    ):
        super().__init__(part, mesh.rank, given.k, given.v, backward)
        self.attention, self.mesh, self.given = attention, mesh, given
        self.q = self._packed(given.q, self.term.heads)
        self.merged = merged_of(self.q, self.v.shape[3])
        self.seen = None if given.seen is None else seen_of(given.seen, part)

    def compute(self, block: Block) -> None:
        rows, tile = self._tile(block)
        out, lse = self._kernel(block).forward(tile)
        self.merged.add(rows, out, lse)
        self.mesh.attend()

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
        for piece, place in packed_places(self.pieces):
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

    def _tile(self, block: Block) -> tuple[slice, TileInputs]:
        """Of a block: which rows of `q` are its queries, and what a kernel is given."""
        rows = self.local.slice(block.queries)
        keys, values = (expand_kv_heads(x, self.term) for x in self.held.pair(block.keys))
        seen = None if self.seen is None else self.seen[:, block.keys.start : block.keys.stop]
        q = self.q[:, :, rows]
        mask = None if seen is None else additive(seen, q)
        return rows, TileInputs(q, keys, values, self.attention.scale, mask, block.kind is Kind.CAUSAL)


class CutBackward(CutForward):
    """dQ of these segments in `dq`, dK and dV in `sums`. `own`: the output of this term alone, where weights of terms
    are constants."""

    def __init__(
        self,
        attention: DilatedAttention,
        part: TermPlan,
        mesh: Mesh,
        dout: Tensor,
        saved: Saved,
        own: Tensor | None,
    ):
        super().__init__(attention, part, mesh, saved.given, backward=True)
        self.dout, self.lse = (self._packed(x, self.term.heads) for x in (dout, saved.lse))
        self.out = self._packed(saved.out, self.term.heads) if own is None else own
        self.dq = torch.zeros(self.q.shape, dtype=accumulator(self.q.dtype), device=self.q.device)
        wide = KVShape.of(self.k, self.v, accumulator(self.k.dtype))
        own_rows = self.exchange.kv_pieces(self.rank)
        self.sums: Gradients = Gradients(wide, own_rows, self.local, self.k.shape[2], leaving(self.steps))

    def compute(self, block: Block) -> None:
        rows, tile = self._tile(block)
        whole = WholeRows(*(x[:, :, rows] for x in (self.dout, self.out, self.lse)))
        dq, dk, dv = self._kernel(block).backward(tile, whole)
        self.dq[:, :, rows] += dq
        self.sums.add(block.keys, collected(dk, self.term), collected(dv, self.term))
        self.mesh.attend()

    def add_gradients(self, totals: Sequence[Tensor]) -> None:
        of = (self.term.heads, self.term.kv_heads, self.term.kv_heads)
        for total, heads, found in zip(totals, of, (self.dq, *self.sums.home()), strict=True):
            for these, view in views(total, heads):
                for piece, place in packed_places(self.pieces):
                    view[:, :, piece.here] += found[:, these, place]


def seen_of(seen: Tensor, part: TermPlan) -> Tensor:
    """[B, S] -> [B, rows that are exchanged]."""
    kept = (part.term.kept.rows(number) for number in part.cut)
    return torch.cat([seen[:, rows.start : rows.stop : rows.step] for rows in kept], 1)
