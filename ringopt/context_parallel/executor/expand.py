"""K and V that are made where they are used: what travels in their place is what they are made of, such as the latents
of multi-head latent attention.

    travels    rows of z, [1, 1, S, L], in the place of K; in the place of V a tensor of no numbers
    forward    K and V of a piece of z, made when its first tile is computed, kept until another piece is asked for
    backward   the same; the gradients of a piece are summed, then go through what made it: to z, whose gradient travels
               home, and to the constants (weights), whose gradients are summed over all pieces that this rank computes
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, Held, Pair, find, wide_zeros
from ringopt.torch_compat.autograd import recording


@dataclass(frozen=True)
class Expansion:
    """`make(z [rows, L], *consts)` gives K [B, Hkv, rows, D] and V [B, Hkv, rows, Dv], each row from its own row of z.

    wanted  places of the `consts` whose gradients are asked for
    """

    make: Callable[..., Pair]
    consts: Sequence[Tensor]
    wanted: tuple[int, ...]
    value_dim: int

    @property
    def learned(self) -> list[Tensor]:
        return [self.consts[place] for place in self.wanted]


class Expanded:
    """K and V of the pieces of `held`, one piece at a time: plans name the blocks of a piece one after the other."""

    def __init__(self, held: Held, expansion: Expansion):
        self.held, self.expansion = held, expansion
        self._piece: range | None = None
        self._made: dict[range, Pair] = {}

    def pair(self, rows: range) -> Pair:
        """K and V of `rows`, which lie within one piece; views."""
        piece = self.held.piece_of(rows)
        if piece != self._piece:
            self.done()
            z = self.held.pair(piece)[0][0, 0]
            self._made[piece] = self.make(z)
            self._piece = piece
        return find(self._made, rows)

    def make(self, z: Tensor) -> Pair:
        with torch.no_grad():
            return self.expansion.make(z, *self.expansion.consts)

    def done(self) -> None:
        """No tile of the piece at work is left."""
        self._made.clear()
        self._piece = None


class ExpandedWithGradients(Expanded):
    """The same; gradients that are added `of` a piece go on to `sums` and `dconsts` when it is done."""

    def __init__(self, held: Held, expansion: Expansion, sums: Gradients, dconsts: Sequence[Tensor]):
        super().__init__(held, expansion)
        self.sums, self.dconsts = sums, dconsts
        self._from: list[Tensor] = []
        self._to: Pair | None = None
        self._grads: dict[range, Pair] = {}

    def make(self, z: Tensor) -> Pair:
        wanted = self.expansion.wanted
        with recording():
            leaf = z.detach().requires_grad_()
            consts = [x.detach().requires_grad_(place in wanted) for place, x in enumerate(self.expansion.consts)]
            self._to = k, v = self.expansion.make(leaf, *consts)
            self._from = [leaf, *(consts[place] for place in wanted)]
        return k.detach(), v.detach()

    def of(self, rows: range) -> Pair:
        """The sums of gradients of K and V of `rows`, in the accumulator's dtype; views."""
        piece = self.held.piece_of(rows)
        if piece not in self._grads:
            k, v = self._made[piece]
            self._grads[piece] = wide_zeros(k), wide_zeros(v)
        return find(self._grads, rows)

    def done(self) -> None:
        if self._piece is not None and self._to is not None and self._grads:
            ((dk, dv),) = self._grads.values()
            self._give(self._piece, [(x, dx.to(x.dtype)) for x, dx in zip(self._to, (dk, dv), strict=True)])
        self._grads.clear()
        self._from, self._to = [], None
        super().done()

    def _give(self, piece: range, grads: Sequence[Pair]) -> None:
        reached = [(x, dx) for x, dx in grads if x.requires_grad]
        if not reached:
            return
        made, given = zip(*reached, strict=True)
        with recording():
            dz, *dconsts = torch.autograd.grad(made, self._from, given, allow_unused=True)
        for total, part in zip((self.sums.of(piece)[0][0, 0], *self.dconsts), (dz, *dconsts), strict=True):
            if part is not None:
                total += part
