"""What computes the blocks of a plan: the kernel of each tile, and the backward of a block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Local
from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.executor.loop import Task
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.merge_lse import Merged
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.executor.tiles import Tile, TileScores
from ringopt.context_parallel.plan.exchange import Block
from ringopt.context_parallel.plan.tiling import joined
from ringopt.distributed.mesh import Mesh
from ringopt.expr.terms import loads
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows, accumulator
from ringopt.kernels.math import Math, Modifier
from ringopt.kernels.scored import Drop, Scored, refusal_of_scored
from ringopt.torch_compat.autograd import recording


class TileKernels:
    """The tiles of a rank's blocks, and what computes each. `learned`: those of the `sources` whose gradients are asked
    for, and the sums to which these are added."""

    def __init__(
        self,
        attention: Attention,
        rank: int,
        given: Operands,
        sources: Sequence[Tensor],
        learned: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ()),
    ):
        q = given.q
        self.pieces = attention.exchange.q_layout.ranges(rank)
        self.local = Local(self.pieces)
        heads = range(attention.first_head, attention.first_head + q.shape[1])
        learns, self._at_once = bool(learned[0]), self._takes_one_launch(attention, given, sources, learned[0])
        self.scores = TileScores(
            attention.exchange.pattern,
            attention.mask,
            sources,
            given.facts or MaskFacts(sources),
            batch=q.shape[0],
            heads=heads,
            dtype=q.dtype,
            device=q.device,
            local=None if attention.exchange.queries_move else self.local,  # those of other ranks are computed too
            bands=attention.kernel.bands and attention.dropout_p == 0,
            fuses=self._at_once and not learns,
            drops=attention.dropout_p > 0,
            whole=self._at_once and learns,
        )
        self.dropout: Dropout | None = None
        if attention.dropout_p > 0:
            if given.seed is None:
                raise ValueError(f"dropout_p is {attention.dropout_p}, and there is no seed to draw from")
            self.dropout = Dropout(attention.dropout_p, given.seed.to(q.device))
        self._attention, self._learned = attention, learned

    def joined(self, blocks: Sequence[Block]) -> Sequence[Block]:
        """Of one piece of keys, as few blocks as the kernel can take at once."""
        scores = self.scores
        at_once = scores.bands or (scores.fuses and (scores.drops or scores.mask.score is not None))
        return joined(scores.pattern, tuple(blocks), self.pieces) if at_once else blocks

    def kernel(self, tile: Tile) -> Kernel:
        """That of the site, unless scores are changed or weights dropped."""
        if tile.level is None and not tile.modified and not tile.fused and self.dropout is None:
            return self._attention.kernel
        return self.changing(tile)

    def changing(self, tile: Tile) -> Math | Scored:
        """One that changes scores, drops weights, and has the gradient of a mask."""
        if not self._at_once or tile.level is not None:
            return self.math(tile)
        drop = Drop(self.dropout.seed, min(self.dropout.least, 2**63 - 1), self.dropout.keep) if self.dropout else None
        return Scored(self._attention.mask, self.scores.sources, self.scores.place(tile), drop, tile.fused)

    @staticmethod
    def _takes_one_launch(
        attention: Attention, given: Operands, sources: Sequence[Tensor], learned: Sequence[Tensor]
    ) -> bool:
        """Whether tiles with such scores do. Gradients of what changes scores are made by autograd, and who asked for
        the kernel in matrix products gets it."""
        changes = learned and {each.source for each in loads(attention.mask.score)}.intersection(attention.learned)
        if changes or attention.kernel.name == Math.name:
            return False
        return refusal_of_scored(given.q, given.value_dim, attention.mask, sources) is None

    def math(self, tile: Tile) -> Math:
        scores, dropout = self.scores, self.dropout

        def rows_of(rows: slice) -> range:
            return tile.queries[rows]

        def change(raw: Tensor, rows: slice) -> Tensor:
            return scores.modified(raw, rows_of(rows), tile.keys)

        def factor(rows: slice) -> Tensor:
            assert dropout is not None
            return dropout.factor(scores.batch, scores.heads, rows_of(rows), tile.keys, accumulator(scores.dtype))

        modifier = Modifier(change, *self._learned) if tile.modified else None
        return Math(tile.level, modifier, factor if dropout is not None else None)

    def sinks(self, sinks: Tensor) -> Tensor:
        """[1|B, Hq, the rank's rows, or 1]: the sinks, less the level of each row."""
        logits = sinks.to(accumulator(self.scores.dtype)).unsqueeze(-1)
        levels = [(piece, self.scores.level(piece)) for piece in self.pieces]
        if all(level is None for _piece, level in levels):
            return logits
        sizes = (self.scores.batch, len(self.scores.heads))
        wholes = [logits.new_zeros(*sizes, len(piece)) if level is None else level.squeeze(-1).expand(*sizes, -1)
                  for piece, level in levels]  # fmt: skip
        return logits - torch.cat(wholes, 2)

    def completed(self, merged: Merged, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out and lse of the rank's rows, whose keys are all in `merged`."""
        if sinks is not None:
            merged.add_logits(slice(None), self.sinks(sinks))
        out, lse = merged.result()
        if self._attention.nan_rows:
            out.masked_fill_((lse == HIDDEN).unsqueeze(-1), torch.nan)
        return out, lse


class BlockBackward(Task):
    """The backward of blocks, whatever travels: gradients of learned sources are summed here, the others as `add`
    says."""

    def __init__(self, attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, dsources: Sequence[Tensor]):
        self.attention, self.mesh, self.dout, self.saved, self.dsources = attention, mesh, dout, saved, dsources
        given, learned = saved.given, set(attention.learned)
        sources = [x.detach().requires_grad_(i in learned) for i, x in enumerate(given.sources)]
        self.learned = [sources[i] for i in attention.learned]
        self.tiles = TileKernels(attention, mesh.rank, given, sources, (self.learned, dsources))

    @abstractmethod
    def operands(self, tile: Tile) -> tuple[TileInputs, WholeRows]: ...

    @abstractmethod
    def add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None: ...

    def compute(self, block: Block) -> None:
        with recording() if self.learned else nullcontext():
            for tile in self.tiles.scores.tiles(block):
                with torch.no_grad():
                    self._tile(tile)

    def dsinks(self) -> Tensor | None:
        """This rank's part, in the shape of the sinks: the weight of a sink leads to 0, not to the row's output."""
        saved, wide, sinks = self.saved, accumulator(self.saved.out.dtype), self.saved.given.sinks
        if sinks is None:
            return None
        weights = (self.tiles.sinks(sinks) - saved.lse).exp_()
        total = (weights.mul_((self.dout.to(wide) * saved.out).sum(-1))).sum(-1).neg_()
        return total.sum_to_size(sinks.shape)

    def _tile(self, tile: Tile) -> None:
        inputs, rows = self.operands(tile)
        if tile.mask is not None and tile.mask.requires_grad:
            dq, dk, dv, dmask = self.tiles.changing(tile).backward_with_mask(inputs, rows)
            self._learn(tile.mask, dmask)
        else:
            dq, dk, dv = self.tiles.kernel(tile).backward(inputs, rows)
        self.add(tile, dq, dk, dv)

    def _learn(self, mask: Tensor, dmask: Tensor) -> None:
        parts = torch.autograd.grad(mask, self.learned, dmask.to(mask.dtype), allow_unused=True)
        for total, part in zip(self.dsources, parts, strict=True):
            if part is not None:
                total += part
