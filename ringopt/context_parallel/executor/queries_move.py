"""Runs a plan in which queries travel in place of keys and values: less where queries are few.

    forward    Q goes out; each stop adds what it has of the output and the log-sum-exp, merged on the way home
    backward   Q, the output, its gradient and the log-sum-exp go out; dQ is summed on the way home; dK and dV stay

Where every rank has all queries ("merge"), nothing travels: the outputs are merged over the ranks, and dQ is this
rank's part, for the caller to sum. So a few queries (decoding, latents, a class token) attend over many keys.

The passing of queries of context parallel decoding (Yang et al., Context Parallelism for Scalable Million-Token
Inference, 2024), here forward and backward, over any plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringopt.context_parallel.executor.blocks import BlockBackward, TileKernels
from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local, Packed, Pair, wide_zeros
from ringopt.context_parallel.executor.interleave import run_alone
from ringopt.context_parallel.executor.loop import Run, Task, leaving
from ringopt.context_parallel.executor.merge_lse import merge_, merged_of
from ringopt.context_parallel.executor.operands import (
    Attention,
    AttentionGrads,
    Operands,
    Saved,
    spread_nan,
    spread_nan_to_keys,
)
from ringopt.context_parallel.executor.tiles import Tile
from ringopt.context_parallel.plan.exchange import Block
from ringopt.context_parallel.plan.tiling import strip_of
from ringopt.distributed.mesh import Mesh
from ringopt.kernels.base import HIDDEN, TileInputs, WholeRows, accumulator
from ringopt.kernels.fused import add_parts_


class Results(Gradients):
    """Outputs [B, Hq, rows, Dv] and log-sum-exps [B, Hq, rows, 1] in place of gradients: merged, not added."""

    def join(self, totals: Sequence[Pair], parts: Sequence[Pair]) -> None:
        for total, part in zip(totals, parts, strict=True):
            merge_(total[0], total[1].squeeze(-1), part[0], part[1].squeeze(-1))

    def join_whole(self, total: Packed, part: Packed) -> None:
        self.join(*([pair for _, pair in each.pairs()] for each in (total, part)))

    def nothing(self, pair: Pair) -> None:
        pair[0].zero_()
        pair[1].fill_(HIDDEN)

    def blank(self, packed: Packed) -> None:
        for _, pair in packed.pairs():
            self.nothing(pair)


def attend_queries(attention: Attention, mesh: Mesh, given: Operands) -> tuple[Tensor, Tensor]:
    """See attend.attend."""
    q, v = given.q, given.v
    task = QueriesForward(attention, mesh, given)
    run_alone(Run(mesh, [task], "forward"))
    merged, found = merged_of(q, v.shape[3]), [task.sums.home()]
    if attention.exchange.merges:  # in the order of the ranks, so that all have the same bits
        parts = mesh.all_gather(torch.cat(found[0], -1), "forward merge")
        # The first becomes the result, which is two tensors, each of its own memory.
        found = [(part[..., :-1], part[..., -1:]) for part in parts]
        found[0] = (found[0][0].clone(), found[0][1].clone())
    for out, lse in found:
        merged.add(slice(0, q.shape[2]), out, lse.squeeze(-1))
    return task.tiles.completed(merged, given.sinks)


def backward_queries(attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved) -> AttentionGrads:
    """See attend.attend_backward."""
    task = QueriesBackward(attention, mesh, dout, saved)
    run_alone(Run(mesh, [task], "backward"))
    found = AttentionGrads(task.sums.home()[0], task.dk, task.dv, task.dsources, task.dsinks())
    if attention.nan_rows:
        hidden, stops = saved.lse == HIDDEN, attention.mask.stops
        if not stops:
            spread_nan(found.dq, found.dsources, hidden)
        spread_nan_to_keys([found.dv] if stops else [found.dk, found.dv], mesh, hidden)
    if attention.exchange.merges and mesh.rank > 0 and found.dsinks is not None:
        found.dsinks.zero_()  # all ranks have the whole of it, and the caller sums parts
    return found


class QueriesForward(Task):
    """Results of the queries that are here, in `sums`. Nothing travels with the queries: the second of the pair that
    `held` has of them is empty."""

    def __init__(self, attention: Attention, mesh: Mesh, given: Operands):
        exchange, rank, q, v = attention.exchange, mesh.rank, given.q, given.v
        self.attention, self.mesh, self.given, self.steps = attention, mesh, given, exchange.forward(rank)
        own, local, none = exchange.q_pieces(rank), Local(exchange.q_layout.ranges(rank)), q[..., :0]
        self.held = Held(KVShape.of(q, none), own, local, q, none)
        result = KVShape(q.shape[0], q.shape[1], v.shape[3], 1, accumulator(q.dtype), q.device)
        self.sums: Results = Results(result, own, local, q.shape[2], leaving(self.steps))
        self.tiles = TileKernels(attention, rank, given, given.sources)
        self.keys_here = Local(exchange.kv_layout.ranges(rank))

    def compute(self, block: Block) -> None:
        for tile in self.tiles.scores.tiles(block):
            for part in tile.strips(strip_of(self.given.q.shape[2], self.given.q.device.type)):
                self.sums.add(part.queries, *self._attended(part))
                self.mesh.attend()

    def _attended(self, part: Tile) -> Pair:
        rows, given = self.keys_here.slice(part.keys), self.given
        q, k, v = self.held.pair(part.queries)[0], given.k[:, :, rows], given.v[:, :, rows]
        inputs = part.inputs(q, k, v, self.attention.scale)
        out, lse = self.tiles.kernel(part).forward(inputs)
        return out, lse.unsqueeze(-1)


class QueriesBackward(BlockBackward):
    """dK and dV here, dQ in `sums`. With the queries in `held` come dout, out and, as numbers of their dtype, the bits
    of the log-sum-exp."""

    def __init__(self, attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved):
        parts = [wide_zeros(saved.given.sources[i]) for i in attention.learned]
        super().__init__(attention, mesh, dout, saved, parts)
        exchange, rank, q, dtype = attention.exchange, mesh.rank, saved.given.q, saved.given.q.dtype
        self.steps = exchange.backward(rank)
        own, local = exchange.q_pieces(rank), Local(exchange.q_layout.ranges(rank))
        packed = torch.cat([dout.to(dtype), saved.out, saved.lse.unsqueeze(-1).contiguous().view(dtype)], -1)
        self.held = Held(KVShape.of(q, packed), own, local, q, packed)
        wide = KVShape.of(q, q[..., :0], accumulator(dtype))
        self.sums: Gradients = Gradients(wide, own, local, q.shape[2], leaving(self.steps))
        self.dk, self.dv = wide_zeros(saved.given.k), wide_zeros(saved.given.v)
        self.keys_here = Local(exchange.kv_layout.ranges(rank))

    def operands(self, tile: Tile) -> tuple[TileInputs, WholeRows]:
        rows, given = self.keys_here.slice(tile.keys), self.saved.given
        q, packed = self.held.pair(tile.queries)
        width = given.v.shape[3]
        dout, out, lse = packed.split([width, width, packed.shape[3] - 2 * width], -1)
        # A copy even where there is one row, whose view is contiguous: its bits may begin where no float32 can.
        wide = lse.clone(memory_format=torch.contiguous_format).view(accumulator(q.dtype)).squeeze(-1)
        k, v = given.k[:, :, rows], given.v[:, :, rows]
        return tile.inputs(q, k, v, self.attention.scale), WholeRows(dout, out, wide)

    def add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows = self.keys_here.slice(tile.keys)
        dk_sum, dv_sum = (x[:, :, rows] for x in (self.dk, self.dv))
        add_parts_([self.sums.of(tile.queries)[0], dk_sum, dv_sum], [dq, dk, dv])
        self.mesh.attend()
