"""Tasks in which keys and values travel: ring attention, halos, all-gather, and whatever else a plan says.

    forward    K and V go out; out and lse of the rank's queries are merged here
    backward   K and V go out again; dQ is summed here, dK and dV on the way home, in the accumulator's dtype

The blocks of the rank's own keys wait for no message: whoever runs a task computes them (`at_home`) where they hide
most, so that its steps have those of other ranks' keys only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ringopt.context_parallel.executor.blocks import BlockBackward, TileKernels
from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local, Pair
from ringopt.context_parallel.executor.expand import Expanded, ExpandedWithGradients
from ringopt.context_parallel.executor.loop import LastMessages, Posted, Task, leaving, post
from ringopt.context_parallel.executor.merge_lse import Merged
from ringopt.context_parallel.executor.operands import (
    Attention,
    AttentionGrads,
    HomeKVGrads,
    Operands,
    Saved,
    Totals,
    spread_nan_to_keys,
)
from ringopt.context_parallel.executor.tiles import Tile
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Step
from ringopt.context_parallel.plan.tiling import strip_of
from ringopt.distributed.mesh import Mesh, Pending
from ringopt.distributed.traffic import log_event
from ringopt.kernels.base import TileInputs, WholeRows, accumulator
from ringopt.kernels.fused import add_parts_


def held_kv(exchange: Exchange, rank: int, k: Tensor, v: Tensor) -> Held:
    """The rank's own K and V; those of others are put there as they come."""
    return Held(KVShape.of(k, v), exchange.kv_pieces(rank), Local(exchange.kv_layout.ranges(rank)), k, v)


def with_joined(step: Step, tiles: TileKernels) -> Step:
    """The blocks of a step as the kernel takes them."""
    blocks = tiles.joined(step.blocks)
    return step if blocks is step.blocks else replace(step, blocks=tuple(blocks))


def post_first(exchange: Exchange, mesh: Mesh, kv: Pair, backward: bool, name: str) -> Posted:
    """The messages of the first step of `KeysForward` or `KeysBackward`, which take nothing but K and V: to be posted
    before there are queries, or a gradient."""
    step = next(iter(exchange.steps(mesh.rank, backward)), Step())
    held = held_kv(exchange, mesh.rank, *kv)
    return post(mesh, [(step, {Cargo.OUT: held})], f"{'backward' if backward else 'forward'} 0{name}")


class KeysForward(Task):
    """out and lse of blocks, merged in `merged`."""

    def __init__(self, attention: Attention, mesh: Mesh, given: Operands, merged: Merged):
        exchange = attention.exchange
        first, *rest = exchange.forward(mesh.rank) or (Step(),)  # the first has the blocks at home
        self.tiles = TileKernels(attention, mesh.rank, given, given.sources)
        self.steps = (replace(first, blocks=()), *(with_joined(step, self.tiles) for step in rest))
        self.held = held_kv(exchange, mesh.rank, given.k, given.v)
        self.exchange, self.scale, self.mesh = exchange, attention.scale, mesh
        self.given, self.merged = given, merged
        self.made = Expanded(self.held, given.expansion) if given.expansion is not None else None

    def compute(self, block: Block) -> None:
        q, source = self.given.q, self.made or self.held
        for tile in self.tiles.scores.tiles(block):
            # What a tile gives is held beside the sums it is merged into, but for a first one that becomes the sums.
            whole = self.merged.empty and len(tile.queries) == q.shape[2] and q.dtype == accumulator(q.dtype)
            for part in tile.strips(q.shape[2] if whole else strip_of(q.shape[2], q.device.type)):
                rows, (keys, values) = self.tiles.local.slice(part.queries), source.pair(part.keys)
                inputs = part.inputs(q[:, :, rows], keys, values, self.scale)
                out, lse = self.tiles.kernel(part).forward(inputs)
                self.merged.add(rows, out, lse)
                self.mesh.attend()

    def at_home(self) -> None:
        """The blocks of the rank's own keys."""
        for block in self.tiles.joined(self.exchange.home_blocks(self.mesh.rank)):
            self.compute(block)
        self.computed()
        log_event("computed", "forward 0", self.mesh.logging_rank)

    def computed(self) -> None:
        if self.made is not None:
            self.made.done()


class KeysBackward(BlockBackward):
    """dQ and the gradients of learned sources are added to `totals`; dK and dV to what leaves for home, or to `totals`
    at home."""

    def __init__(self, attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, totals: Totals):
        super().__init__(attention, mesh, dout, saved, totals.dsources)
        exchange, k, v = attention.exchange, saved.given.k, saved.given.v
        steps = [with_joined(step, self.tiles) for step in exchange.backward(mesh.rank)]
        self.steps = (*steps[:-1], *(replace(step, blocks=()) for step in steps[-1:]))  # the last has those at home
        self._rows: dict[range, WholeRows] = {}
        self.dq, self.held = totals.dq, held_kv(exchange, mesh.rank, k, v)
        own, local = exchange.kv_pieces(mesh.rank), Local(exchange.kv_layout.ranges(mesh.rank))
        wide = KVShape.of(k, v, accumulator(k.dtype))
        self.sums: Gradients = Gradients(wide, own, local, k.shape[2], leaving(steps), totals.home)
        self.made: ExpandedWithGradients | None = None
        if (expansion := saved.given.expansion) is not None:
            self.made = ExpandedWithGradients(self.held, expansion, self.sums, totals.dconsts)

    def at_home(self, label: str) -> None:
        """The blocks of the rank's own keys."""
        for block in self.tiles.joined(self.attention.exchange.home_blocks(self.mesh.rank)):
            self.compute(block)
        self.computed()
        log_event("computed", label, self.mesh.logging_rank)

    def computed(self) -> None:
        if self.made is not None:
            self.made.done()

    def operands(self, tile: Tile) -> tuple[TileInputs, WholeRows]:
        rows, (k, v) = self.tiles.local.slice(tile.queries), (self.made or self.held).pair(tile.keys)
        inputs = tile.inputs(self.saved.given.q[:, :, rows], k, v, self.attention.scale)
        return inputs, self._of_rows(tile.queries)

    def _of_rows(self, queries: range) -> WholeRows:
        """Kept, for many tiles have the same: views, but for the log-sum-exp."""
        if queries not in self._rows:
            own, saved = self.tiles.local.slice(queries), self.saved
            self._rows[queries] = WholeRows(*(x[:, :, own] for x in (self.dout, saved.out, saved.lse))).visible()
        return self._rows[queries]

    def add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        dq_sum, sums = self.dq[:, :, self.tiles.local.slice(tile.queries)], (self.made or self.sums).of(tile.keys)
        add_parts_([dq_sum, *sums], [dq, dk, dv])
        self.mesh.attend()


# ---- a backward that ends later --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PendingKVGrads:
    """dK and dV, the last sums of which are on their way here. Holds what these are added to, and nothing else of the
    backward.

    hidden  rows whose gradients are NaN for all values, and for all keys unless `stops`
    """

    mesh: Mesh
    home: HomeKVGrads
    last: Sequence[LastMessages]
    hidden: Tensor | None
    stops: bool

    @property
    def pending(self) -> list[Pending]:
        return [pending for each in self.last for pending in each.pending]

    def wait(self) -> Pair:
        """dK and dV, once. Raises RingCommError."""
        for each in self.last:
            each.arrive()
        dk, dv = self.home.pair
        if self.hidden is not None:
            spread_nan_to_keys([dv] if self.stops else [dk, dv], self.mesh, self.hidden)
        return dk, dv


@dataclass(frozen=True)
class PendingGrads:
    """A backward of which all is computed. Gradients are in the accumulator's dtype."""

    dq: Tensor
    dsources: Sequence[Tensor]
    dsinks: Tensor | None
    kv: PendingKVGrads

    def wait(self) -> AttentionGrads:
        """Once. Raises RingCommError."""
        return AttentionGrads(self.dq, *self.kv.wait(), self.dsources, self.dsinks)
