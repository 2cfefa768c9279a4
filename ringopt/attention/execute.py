"""Runs the plan of an exchange on one rank: attention forward, and its backward.

    for each step:  post messages | compute blocks while they travel | wait | keep what came | drop what is done with

One executor for every strategy, layout and pattern: what differs is in the plan (exchange.py). Ring attention (Liu et
al. 2023) is this loop over a plan in which everybody sends to the next rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.attention.exchange import Block, Cargo, Exchange, Message, Step
from ringopt.attention.merge import Merged
from ringopt.attention.packing import Gradients, Held, KVShape, Local, Packed
from ringopt.attention.tiles import Scores, Tile
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.traffic import log_event
from ringopt.graph.mask import Mask
from ringopt.kernels.base import Kernel, accumulator
from ringopt.kernels.math import Math

# Queries of a forward tile, or an eighth of the local ones if that is more: few enough for its output to be small
# beside the sums, enough to keep the kernel busy.
STRIP = 256


@dataclass(frozen=True)
class Attention:
    """What is computed, and by which plan and kernel.

    learned   numbers of the `sources` whose gradients are asked for
    """

    exchange: Exchange
    mask: Mask
    kernel: Kernel
    scale: float
    learned: tuple[int, ...] = ()

    def scores(self, q: Tensor, sources: Sequence[Tensor]) -> Scores:
        return Scores(self.exchange.pattern, self.mask, sources, q.shape[0], q.shape[1], q.dtype, q.device)


def attend(
    attention: Attention, mesh: Mesh, q: Tensor, k: Tensor, v: Tensor, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq_local, Dv] in q's dtype and lse [B, Hq, Sq_local], both contiguous.

    q [B, Hq, Sq_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local, Dv] are the rows that the layouts give this
    rank. Raises RingCommError.
    """
    exchange, rank = attention.exchange, mesh.rank
    local = Local(exchange.q_layout.ranges(rank))
    held = Held(KVShape.of(k, v), exchange.kv_pieces(rank), Local(exchange.kv_layout.ranges(rank)), k, v)
    scores, merged = attention.scores(q, sources), Merged(q, v.shape[3])
    strip = max(STRIP, -(-q.shape[2] // 8))

    def compute(block: Block) -> None:
        for tile in scores.tiles(block):
            # What a tile gives is held beside the sums it is merged into, but for the first, which becomes the sums.
            whole = merged.empty and len(tile.queries) == q.shape[2]
            for part in tile.strips(q.shape[2] if whole else strip):
                rows, (keys, values) = local.slice(part.queries), held.pair(part.keys)
                given = (q[:, :, rows], keys, values, part.mask, part.causal, attention.scale)
                kernel = attention.kernel if part.level is None else Math(part.level)
                merged.add(rows, *kernel.forward(*given))

    for number, step in enumerate(exchange.forward(rank)):
        label = f"forward {number}"
        arriving = [held.shape.empty(message.rows) for message in step.receives]
        pending = mesh.exchange(
            [(message.target, held.message(message.rows)) for message in step.sends], _into(step, arriving), label
        )
        for block in step.blocks:
            compute(block)
        log_event("computed", label, rank)
        pending.wait()
        while arriving:
            held.put(arriving.pop())
        held.drop(step.drops)
    return merged.result()


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward: the rank's rows of everything, `out` and `lse` over all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    sources: Sequence[Tensor]


def attend_backward(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """dq, dk, dv of the rank's rows, complete; and of each learned source this rank's part of the gradient.

    K and V travel again, and sums of dK and dV travel home in the accumulator's dtype. Raises RingCommError.
    """
    exchange, rank, (k, v) = attention.exchange, mesh.rank, (saved.k, saved.v)
    steps, own = exchange.backward(rank), exchange.kv_pieces(rank)
    local = Local(exchange.kv_layout.ranges(rank))
    wide = accumulator(k.dtype)
    held = Held(KVShape.of(k, v), own, local, k, v)
    leaving = [message for step in steps for message in step.sends if message.cargo is Cargo.BACK]
    gradients = Gradients(KVShape.of(k, v, wide), own, local, k.shape[2], leaving)
    blocks = BlockBackward(attention, rank, dout, saved, held, gradients)
    for number, step in enumerate(steps):
        label = f"backward {number}"
        arriving = [_shape(message, held, gradients).empty(message.rows) for message in step.receives]
        sends = [(message.target, _outgoing(message, held, gradients)) for message in step.sends]
        pending = mesh.exchange(sends, _into(step, arriving), label)
        del sends
        for block in step.blocks:
            blocks.compute(block)
        log_event("computed", label, rank)
        pending.wait()
        for message in step.receives:
            packed = arriving.pop(0)
            if message.cargo is Cargo.OUT:
                held.put(packed)
            else:
                gradients.arrived(packed)
        del arriving
        held.drop(step.drops)
    dk, dv = gradients.home()
    return blocks.dq.to(saved.q.dtype), dk.to(k.dtype), dv.to(v.dtype), blocks.dsources()


class BlockBackward:
    """Gradients of blocks, summed: dq and those of learned sources here, dK and dV in `gradients`."""

    def __init__(self, attention: Attention, rank: int, dout: Tensor, saved: Saved, held: Held, gradients: Gradients):
        self.attention, self.dout, self.saved, self.held, self.gradients = attention, dout, saved, held, gradients
        wide = accumulator(saved.q.dtype)
        self.local = Local(attention.exchange.q_layout.ranges(rank))
        self.dq = torch.zeros(saved.q.shape, dtype=wide, device=saved.q.device)
        learned = set(attention.learned)
        self.sources = [x.detach().requires_grad_(i in learned) for i, x in enumerate(saved.sources)]
        self.learned = [self.sources[i] for i in attention.learned]
        self.parts = [torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in self.learned]
        self.scores = attention.scores(saved.q, self.sources)

    def compute(self, block: Block) -> None:
        with recording() if self.learned else nullcontext():
            for tile in self.scores.tiles(block):
                with torch.no_grad():
                    self._tile(tile)

    def dsources(self) -> list[Tensor]:
        return [part.to(source.dtype) for part, source in zip(self.parts, self.learned, strict=True)]

    def _tile(self, tile: Tile) -> None:
        rows, attention, saved = self.local.slice(tile.queries), self.attention, self.saved
        keys, values = self.held.pair(tile.keys)
        dout, q, out, lse = (x[:, :, rows] for x in (self.dout, saved.q, saved.out, saved.lse))
        given, mask, how = (dout, q, keys, values, out, lse), tile.mask, (tile.causal, attention.scale)
        if mask is not None and mask.requires_grad:
            dq, dk, dv, dmask = Math(tile.level).backward_with_mask(*given, mask, *how)
            self._learn(mask, dmask)
        else:
            kernel = attention.kernel if tile.level is None else Math(tile.level)
            dq, dk, dv = kernel.backward(*given, mask, *how)
        self.dq[:, :, rows] += dq
        self.gradients.add(tile.keys, dk, dv)

    def _learn(self, mask: Tensor, dmask: Tensor) -> None:
        parts = torch.autograd.grad(mask, self.learned, dmask.to(mask.dtype), allow_unused=True)
        for total, part in zip(self.parts, parts, strict=True):
            if part is not None:
                total += part


@contextmanager
def recording() -> Iterator[None]:
    """Autograd on, even inside an operator: the dispatcher excludes it there, and enable_grad alone records nothing."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def _shape(message: Message, held: Held, gradients: Gradients) -> KVShape:
    return held.shape if message.cargo is Cargo.OUT else gradients.shape


def _outgoing(message: Message, held: Held, gradients: Gradients) -> Tensor:
    return held.message(message.rows) if message.cargo is Cargo.OUT else gradients.take(message)


def _into(step: Step, arriving: Sequence[Packed]) -> list[tuple[int, Tensor]]:
    return [(message.source, packed.flat) for message, packed in zip(step.receives, arriving, strict=True)]
