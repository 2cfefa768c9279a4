"""Runs a plan in which queries travel in place of keys and values: less where queries are few.

    forward    Q goes out; each stop adds what it has of the output and the log-sum-exp, merged on the way home
    backward   Q, the output, its gradient and the log-sum-exp go out; dQ is summed on the way home; dK and dV stay

Where every rank has all queries ("merge"), nothing travels: the outputs are merged over the ranks, and dQ is this
rank's part, for the caller to sum. So a few queries (decoding, latents, a class token) attend over many keys.

The passing of queries of context parallel decoding (Yang et al., Context Parallelism for Scalable Million-Token
Inference, 2024), here forward and backward, over any plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Local, Pair
from ringopt.context_parallel.executor.interleave import Turns, by_turns
from ringopt.context_parallel.executor.keys_move import (
    Attention,
    BlockBackward,
    Found,
    Operands,
    Saved,
    Tiles,
    finished,
    wide_zeros,
)
from ringopt.context_parallel.executor.merge_lse import Merged, merge_
from ringopt.context_parallel.executor.messages import Posted, deliver, leaving, there_and_back
from ringopt.context_parallel.executor.tiles import Tile
from ringopt.context_parallel.plan.exchange import Block
from ringopt.context_parallel.plan.tiling import strip_of
from ringopt.distributed.mesh import Mesh
from ringopt.kernels.base import HIDDEN, accumulator


class Results(Gradients):
    """Outputs [B, Hq, rows, Dv] and log-sum-exps [B, Hq, rows, 1] in place of gradients: merged, not added."""

    def join(self, total: Pair, part: Pair) -> None:
        merge_(total[0], total[1].squeeze(-1), part[0], part[1].squeeze(-1))

    def nothing(self, pair: Pair) -> None:
        pair[0].zero_()
        pair[1].fill_(HIDDEN)


def attend_queries(attention: Attention, mesh: Mesh, given: Operands) -> tuple[Tensor, Tensor]:
    """See run.attend."""
    exchange, rank, (q, k, v) = attention.exchange, mesh.rank, (given.q, given.k, given.v)
    steps, own, local = exchange.forward(rank), exchange.q_pieces(rank), Local(exchange.q_layout.ranges(rank))
    none = q[..., :0]
    held = Held(KVShape.of(q, none), own, local, q, none)
    result = KVShape(q.shape[0], q.shape[1], v.shape[3], 1, accumulator(q.dtype), q.device)
    results = Results(result, own, local, q.shape[2], leaving(steps))
    tiles, keys_here = Tiles(attention, rank, given, given.sources), Local(exchange.kv_layout.ranges(rank))

    def attended(part: Tile) -> Pair:
        rows = keys_here.slice(part.keys)
        operands = (held.pair(part.queries)[0], k[:, :, rows], v[:, :, rows])
        out, lse = tiles.kernel(part).forward(*operands, part.mask, part.causal, attention.scale)
        return out, lse.unsqueeze(-1)

    def compute(block: Block) -> None:
        for tile in tiles.scores.tiles(block):
            for part in tile.strips(strip_of(q.shape[2])):
                results.add(part.queries, *attended(part))
                mesh.attend()

    finish(there_and_back(mesh, steps, held, results, compute, "forward"), results)
    merged, found = Merged(q, v.shape[3]), [results.home()]
    if exchange.merges:  # in the order of the ranks, so that all have the same bits
        parts = mesh.all_gather(torch.cat(found[0], -1), "forward merge")
        # Each of its own memory: the first of them becomes the result, which is two tensors.
        found = [(part[..., :-1].clone(), part[..., -1:].clone()) for part in parts]
    for out, lse in found:
        merged.add(slice(0, q.shape[2]), out, lse.squeeze(-1))
    return tiles.completed(merged, given.sinks)


def backward_queries(attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved) -> Found:
    """See run.attend_backward."""
    exchange, rank, given = attention.exchange, mesh.rank, saved.given
    steps, own, local = exchange.backward(rank), exchange.q_pieces(rank), Local(exchange.q_layout.ranges(rank))
    q, dtype = given.q, given.q.dtype
    beside = torch.cat([dout.to(dtype), saved.out, saved.lse.unsqueeze(-1).contiguous().view(dtype)], -1)
    held = Held(KVShape.of(q, beside), own, local, q, beside)
    sums = Gradients(KVShape.of(q, q[..., :0], accumulator(dtype)), own, local, q.shape[2], leaving(steps))
    blocks = QueriesMove(attention, mesh, dout, saved, held, sums)
    finish(there_and_back(mesh, steps, held, sums, blocks.compute, "backward"), sums)
    found = finished(Found(sums.home()[0], blocks.dk, blocks.dv, blocks.parts), blocks, mesh)
    if exchange.merges and rank > 0 and found.dsinks is not None:
        found.dsinks.zero_()  # all ranks have the whole of it, and the caller sums parts
    return found


def finish(run: Turns[list[Posted]], sums: Gradients) -> None:
    """One exchange, that has nobody to take turns with."""
    (last,) = by_turns([run])
    while last:
        deliver(last.pop(0), sums.arrived)


class QueriesMove(BlockBackward):
    """dK and dV here, dQ in `sums`. With the queries in `held` come dout, out and, as numbers of their dtype, the bits
    of the log-sum-exp."""

    def __init__(self, attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, held: Held, sums: Gradients):
        parts = [wide_zeros(saved.given.sources[i]) for i in attention.learned]
        super().__init__(attention, mesh.rank, dout, saved, parts)
        self.mesh, self.held, self.sums = mesh, held, sums
        self.dk, self.dv = wide_zeros(saved.given.k), wide_zeros(saved.given.v)
        self.keys_here = Local(attention.exchange.kv_layout.ranges(mesh.rank))

    def operands(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        rows, given = self.keys_here.slice(tile.keys), self.saved.given
        q, beside = self.held.pair(tile.queries)
        width = given.v.shape[3]
        dout, out, lse = beside.split([width, width, beside.shape[3] - 2 * width], -1)
        # A copy even where there is one row, whose view is contiguous: its bits may begin where no float32 can.
        wide = lse.clone(memory_format=torch.contiguous_format).view(accumulator(q.dtype)).squeeze(-1)
        return dout, q, given.k[:, :, rows], given.v[:, :, rows], out, wide

    def add(self, tile: Tile, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        rows = self.keys_here.slice(tile.keys)
        self.sums.add(tile.queries, dq, dq[..., :0])
        self.dk[:, :, rows] += dk
        self.dv[:, :, rows] += dv
        self.mesh.attend()
