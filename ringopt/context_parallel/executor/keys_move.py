"""Runs the plan of an exchange on one rank: attention forward, and its backward.

    for each step:  post messages | compute blocks while they travel | wait | keep what came | drop what is done with

One executor for every strategy, layout and pattern in which keys travel (attend.py has the others): what differs is in
the plan (plan/exchange.py). Ring attention (Liu et al. 2023) is this loop over a plan in which everybody sends to the
next rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local, Pair
from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.executor.merge_lse import Merged
from ringopt.context_parallel.executor.messages import Posted, deliver, leaving, post, there_and_back
from ringopt.context_parallel.executor.tiles import Scores, Tile
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Step
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.tiling import strip_of
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.traffic import log_event
from ringopt.expr.mask import Mask
from ringopt.kernels.base import HIDDEN, Kernel, accumulator
from ringopt.kernels.math import Math, Modifier
from ringopt.kernels.recording import recording


@dataclass(frozen=True)
class Attention:
    """What is computed, and by which plan and kernel.

    learned     numbers of the `sources` whose gradients are asked for
    dropout_p   probability with which a weight is dropped
    first_head  number of the first query head that is given: mask and dropout know heads by number
    heads       where rows are traded for heads, the plan of that; `exchange` is then the one between nodes
    """

    exchange: Exchange
    mask: Mask
    kernel: Kernel
    scale: float
    learned: tuple[int, ...] = ()
    dropout_p: float = 0.0
    first_head: int = 0
    heads: HeadExchange | None = None

    @property
    def nan_rows(self) -> bool:
        """Whether there may be rows that are NaN because they see no key."""
        pattern, parts = self.exchange.pattern, any(term is not None for term in self.mask.terms)
        return self.mask.nan and (parts or pattern.blind)


@dataclass(frozen=True)
class Operands:
    """The rank's rows, as the layouts give them: q [B, Hq, Sq_local, D], k [B, Hkv, Sk_local, D], v [B, Hkv, Sk_local,
    Dv].

    sources   what the mask reads
    sinks     [1|B, Hq]: one more logit in the softmax of every row, that leads to no value
    seed      of dropout: int64 without dims, the same on all ranks
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sources: Sequence[Tensor] = ()
    sinks: Tensor | None = None
    seed: Tensor | None = None


class Tiles:
    """The tiles of a rank's blocks, and what computes each. `parts`: where gradients of the `learned` are added, that
    are among `sources`."""

    def __init__(
        self,
        attention: Attention,
        rank: int,
        given: Operands,
        sources: Sequence[Tensor],
        learned: Sequence[Tensor] = (),
        parts: Sequence[Tensor] = (),
    ):
        q = given.q
        self.pieces = attention.exchange.q_layout.ranges(rank)
        self.local = Local(self.pieces)
        heads = range(attention.first_head, attention.first_head + q.shape[1])
        self.scores = Scores(
            *(attention.exchange.pattern, attention.mask, sources, q.shape[0], heads, q.dtype, q.device),
            local=None if attention.exchange.queries_move else self.local,  # those of other ranks are computed too
        )
        self.dropout: Dropout | None = None
        if attention.dropout_p > 0:
            if given.seed is None:
                raise ValueError(f"dropout_p is {attention.dropout_p}, and there is no seed to draw from")
            self.dropout = Dropout(attention.dropout_p, given.seed.to(q.device))
        self._attention, self._learned, self._parts = attention, learned, parts

    def kernel(self, tile: Tile) -> Kernel:
        """That of the site, unless only the written-out one can do it."""
        if tile.level is None and not tile.modified and self.dropout is None:
            return self._attention.kernel
        return self.math(tile)

    def math(self, tile: Tile) -> Math:
        scores, dropout = self.scores, self.dropout

        def rows_of(rows: slice) -> range:
            return tile.queries[rows]

        def change(raw: Tensor, rows: slice) -> Tensor:
            return scores.modified(raw, rows_of(rows), tile.keys)

        def factor(rows: slice) -> Tensor:
            assert dropout is not None
            return dropout.factor(scores.batch, scores.heads, rows_of(rows), tile.keys, accumulator(scores.dtype))

        modifier = Modifier(change, self._learned, self._parts) if tile.modified else None
        return Math(tile.level, modifier, factor if dropout is not None else None)

    def sinks(self, sinks: Tensor, piece: range) -> Tensor:
        """[B, Hq, rows of `piece`]: the sinks, less the level of each row."""
        wide = accumulator(self.scores.dtype)
        logits = sinks.to(wide).unsqueeze(-1).expand(self.scores.batch, len(self.scores.heads), len(piece))
        level = self.scores.level(piece)
        return logits if level is None else logits - level.squeeze(-1)

    def completed(self, merged: Merged, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out and lse of the rank's rows, whose keys are all in `merged`."""
        if sinks is not None:
            for piece in self.pieces:
                merged.add_logits(self.local.slice(piece), self.sinks(sinks, piece))
        out, lse = merged.result()
        if self._attention.nan_rows:
            out.masked_fill_((lse == HIDDEN).unsqueeze(-1), torch.nan)
        return out, lse


def post_first(attention: Attention, mesh: Mesh, k: Tensor, v: Tensor, backward: bool, group: str = "") -> Posted:
    """The messages of the first step of `Attending` or `KeysMove`, which take nothing but K and V: to be posted before
    there are queries, or a gradient."""
    exchange, rank = attention.exchange, mesh.rank
    held = Held(KVShape.of(k, v), exchange.kv_pieces(rank), Local(exchange.kv_layout.ranges(rank)), k, v)
    step = next(iter(exchange.steps(rank, backward)), Step())
    return post(mesh, step, Cargo.OUT, held, f"{'backward' if backward else 'forward'} 0{group}")


class Attending:
    """Outputs of blocks on a rank, gathered in `merged`."""

    def __init__(self, attention: Attention, mesh: Mesh, given: Operands, merged: Merged):
        self.exchange, self.scale, self.mesh = attention.exchange, attention.scale, mesh
        self.given, self.merged = given, merged
        own, local = self.exchange.kv_pieces(mesh.rank), Local(self.exchange.kv_layout.ranges(mesh.rank))
        self.held = Held(KVShape.of(given.k, given.v), own, local, given.k, given.v)
        self.tiles = Tiles(attention, mesh.rank, given, given.sources)

    def compute(self, block: Block) -> None:
        q = self.given.q
        for tile in self.tiles.scores.tiles(block):
            # What a tile gives is held beside the sums it is merged into, but for a first one that becomes the sums.
            whole = self.merged.empty and len(tile.queries) == q.shape[2] and q.dtype == accumulator(q.dtype)
            for part in tile.strips(q.shape[2] if whole else strip_of(q.shape[2])):
                rows, (keys, values) = self.tiles.local.slice(part.queries), self.held.pair(part.keys)
                operands = (q[:, :, rows], keys, values, part.mask, part.causal, self.scale)
                self.merged.add(rows, *self.tiles.kernel(part).forward(*operands))
                self.mesh.attend()

    def at_home(self) -> None:
        """The blocks of the rank's own keys."""
        for block in self.exchange.home_blocks(self.mesh.rank):
            self.compute(block)
        log_event("computed", "forward 0", self.mesh.teller)

    def away(self, first: Posted, group: str = "") -> Generator[None, None, None]:
        """K and V travel, and the blocks of other ranks' are computed. Stops wherever it would wait. `first`: the
        messages of the first step, behind which `at_home` is done."""
        rows = first
        for number, step in enumerate(self.exchange.forward(self.mesh.rank)):
            if number > 0:
                label = f"forward {number}{group}"
                rows = post(self.mesh, step, Cargo.OUT, self.held, label)
                for block in step.blocks:
                    self.compute(block)
                log_event("computed", label, self.mesh.teller)
                yield
            deliver(rows, self.held.put)
            self.held.drop(step.drops)


@dataclass(frozen=True)
class Saved:
    """What the forward leaves for the backward; `out` and `lse` are over all keys."""

    given: Operands
    out: Tensor
    lse: Tensor


def without_nan(attention: Attention, dout: Tensor, saved: Saved) -> tuple[Tensor, Saved]:
    """Zeros in place of rows that are NaN because they see no key, where no gradient reaches their scores."""
    if not (attention.nan_rows and attention.mask.stops):
        return dout, saved
    hidden = (saved.lse == HIDDEN).unsqueeze(-1)
    return dout.masked_fill(hidden, 0.0), replace(saved, out=saved.out.masked_fill(hidden, 0.0))


@dataclass(frozen=True)
class Coming:
    """A backward of which all is computed, and the last sums of dK and dV are on their way here."""

    gradients: Gradients
    last: list[Posted]

    def arrive(self) -> None:
        """Adds them to what `home` gave. Raises RingCommError."""
        while self.last:
            deliver(self.last.pop(0), self.gradients.arrived)
        self.gradients.home()


def finished(found: Found, blocks: BlockBackward, mesh: Mesh) -> Found:
    """With the gradient of the sinks, and NaN where rows are."""
    found = replace(found, dsinks=blocks.dsinks())
    if blocks.attention.nan_rows:
        hidden, stops = blocks.saved.lse == HIDDEN, blocks.attention.mask.stops
        if not stops:
            spread_nan(found.dq, found.parts, hidden)
        spread_nan_to_keys([found.dv] if stops else [found.dk, found.dv], mesh, hidden)
    return found


@dataclass(frozen=True)
class Found:
    """Gradients in the accumulator's dtype; `parts` are those of learned sources."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    parts: Sequence[Tensor]
    dsinks: Tensor | None = None

    @classmethod
    def zeros(cls, given: Operands, learned: Sequence[int]) -> Found:
        dq, dk, dv, *parts = map(wide_zeros, (given.q, given.k, given.v, *(given.sources[i] for i in learned)))
        return cls(dq, dk, dv, parts, wide_zeros(given.sinks) if given.sinks is not None else None)

    def rounded(self, given: Operands, learned: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """dq, dk, dv and the other gradients, that of the sinks last, in the dtypes of what they are gradients of."""
        beside = rounded_parts(self.parts, self.dsinks, given, learned)
        return self.dq.to(given.q.dtype), self.dk.to(given.k.dtype), self.dv.to(given.v.dtype), beside


def rounded_parts(
    parts: Sequence[Tensor], dsinks: Tensor | None, given: Operands, learned: Sequence[int]
) -> list[Tensor]:
    found = [part.to(given.sources[i].dtype) for part, i in zip(parts, learned, strict=True)]
    if dsinks is not None and given.sinks is not None:
        found.append(dsinks.to(given.sinks.dtype))
    return found


def wide_zeros(x: Tensor) -> Tensor:
    """As `x`, in the accumulator's dtype."""
    return torch.zeros(x.shape, dtype=accumulator(x.dtype), device=x.device)


def spread_nan(dq: Tensor, parts: Sequence[Tensor], hidden: Tensor) -> None:
    """In place: the weights of the rows `hidden` [B, Hq, Sq_local] are NaN for all keys."""
    dq.masked_fill_(hidden.unsqueeze(-1), torch.nan)
    if bool(hidden.any()):
        for part in parts:
            part.fill_(torch.nan)


def spread_nan_to_keys(grads: Sequence[Tensor], mesh: Mesh, hidden: Tensor) -> None:
    """The same for gradients of keys and values, and rows of any rank."""
    batch, kv_heads = grads[0].shape[:2]
    heads = hidden.any(-1).view(batch, kv_heads, -1).any(-1)
    heads = mesh.all_reduce(heads.to(mesh.device, torch.int32), "nan").to(hidden.device) > 0
    for grad in grads:
        grad.masked_fill_(heads[:, :, None, None], torch.nan)


class BlockBackward(ABC):
    """Gradients of blocks, summed: those of learned sources here, the others as `add` says."""

    def __init__(self, attention: Attention, rank: int, dout: Tensor, saved: Saved, parts: Sequence[Tensor]):
        self.attention, self.dout, self.saved, self.parts = attention, dout, saved, parts
        given, learned = saved.given, set(attention.learned)
        sources = [x.detach().requires_grad_(i in learned) for i, x in enumerate(given.sources)]
        self.learned = [sources[i] for i in attention.learned]
        self.tiles = Tiles(attention, rank, given, sources, self.learned, self.parts)

    @abstractmethod
    def operands(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dout, q, k, v, out, lse of the tile."""

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
        total = torch.zeros(saved.out.shape[:2], dtype=wide, device=sinks.device)
        for piece in self.tiles.pieces:
            rows = self.tiles.local.slice(piece)
            weights = (self.tiles.sinks(sinks, piece) - saved.lse[:, :, rows]).exp()
            total -= (weights * (self.dout[:, :, rows].to(total.dtype) * saved.out[:, :, rows]).sum(-1)).sum(-1)
        return total.sum_to_size(sinks.shape)

    def _tile(self, tile: Tile) -> None:
        operands, mask, how = self.operands(tile), tile.mask, (tile.causal, self.attention.scale)
        if mask is not None and mask.requires_grad:
            dq, dk, dv, dmask = self.tiles.math(tile).backward_with_mask(*operands, mask, *how)
            self._learn(mask, dmask)
        else:
            dq, dk, dv = self.tiles.kernel(tile).backward(*operands, mask, *how)
        self.add(tile, dq, dk, dv)

    def _learn(self, mask: Tensor, dmask: Tensor) -> None:
        parts = torch.autograd.grad(mask, self.learned, dmask.to(mask.dtype), allow_unused=True)
        for total, part in zip(self.parts, parts, strict=True):
            if part is not None:
                total += part


class KeysMove(BlockBackward):
    """dQ here, dK and dV in `gradients`: of messages that leave, and at home. `dq`, `parts` (of learned sources), and
    what `home` gives when it is first needed, are zeros to which gradients are added."""

    def __init__(
        self,
        attention: Attention,
        mesh: Mesh,
        dout: Tensor,
        saved: Saved,
        dq: Tensor,
        parts: Sequence[Tensor],
        home: Callable[[], Pair],
    ):
        super().__init__(attention, mesh.rank, dout, saved, parts)
        exchange, k, v = attention.exchange, saved.given.k, saved.given.v
        self.mesh, self.dq, self.steps = mesh, dq, exchange.backward(mesh.rank)
        own, local = exchange.kv_pieces(mesh.rank), Local(exchange.kv_layout.ranges(mesh.rank))
        self.held = Held(KVShape.of(k, v), own, local, k, v)
        wide = KVShape.of(k, v, accumulator(k.dtype))
        self.gradients = Gradients(wide, own, local, k.shape[2], leaving(self.steps), home)

    def at_home(self, label: str) -> None:
        """The blocks of the rank's own keys."""
        for block in self.attention.exchange.home_blocks(self.mesh.rank):
            self.compute(block)
        log_event("computed", label, self.mesh.teller)

    def away(self, first: Posted, group: str = "") -> Generator[None, None, Coming]:
        """K and V travel again, and sums of dK and dV travel home. Stops wherever it would wait, and ends when all is
        computed but `at_home`, for which both the `first` messages and the last that it leaves behind can wait."""
        away = (*self.steps[:-1], *(replace(step, blocks=()) for step in self.steps[-1:]))  # the last has those at home
        way = (self.held, self.gradients, self.compute, "backward", group, first)
        return Coming(self.gradients, (yield from there_and_back(self.mesh, away, *way)))

    def operands(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, saved = self.tiles.local.slice(tile.queries), self.saved
        dout, q, out, lse = (x[:, :, rows] for x in (self.dout, saved.given.q, saved.out, saved.lse))
        return dout, q, *self.held.pair(tile.keys), out, lse

    def add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.dq[:, :, self.tiles.local.slice(tile.queries)] += dq
        self.gradients.add(tile.keys, dk, dv)
        self.mesh.attend()
