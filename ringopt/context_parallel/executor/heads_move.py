"""Runs the plans of "ulysses" and "hybrid" (plan/head_exchange.py) on one rank: its heads of all rows of its node come,
are computed by the plan between nodes, and their results go back to the rows' ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Local
from ringopt.context_parallel.executor.keys_move import PendingGrads
from ringopt.context_parallel.executor.operands import Attention, AttentionGrads, Operands, Saved
from ringopt.context_parallel.geometry.rows import Rows, count
from ringopt.context_parallel.plan.head_exchange import HeadExchange, Parcel, Part
from ringopt.distributed.mesh import Mesh
from ringopt.distributed.submesh import SubMesh
from ringopt.kernels.base import accumulator

# What runs the plan between nodes, of some heads (attend.attend_keys, attend.backward_keys).
Forward = Callable[[Attention, Mesh, Operands], tuple[Tensor, Tensor]]
Backward = Callable[[Attention, Mesh, Tensor, Saved], PendingGrads]


@dataclass(frozen=True)
class Item:
    """A tensor [B, H, S, D] of the trade.

    local     this rank's: its own rows of all heads on the way out, the node's rows of its heads on the way back
    rows      of a parcel: which rows of the sequence it has of the tensor
    heads     of a parcel: which heads
    together  the rows of the node
    """

    local: Tensor
    rows: Callable[[Parcel], Rows]
    heads: Callable[[Parcel], range]
    together: Rows

    def sizes(self, parcel: Parcel) -> tuple[int, int, int, int]:
        batch, *_, width = self.local.shape
        return batch, len(self.heads(parcel)), count(self.rows(parcel)), width


class Trade:
    """The all-to-all of one rank with those of its node, there and back. Raises RingCommError."""

    def __init__(self, plan: HeadExchange, mesh: Mesh):
        self.plan, self.mesh, self.rank, self.peers = plan, mesh, mesh.rank, plan.peers(mesh.rank)
        sides, node = (plan.whole.q_layout, plan.whole.kv_layout), mesh.rank // plan.node
        self.q_rows, self.kv_rows = (side.ranges(node) for side in sides)

    def of_queries(self, x: Tensor) -> Item:
        return Item(x, lambda parcel: parcel.q_rows, lambda parcel: parcel.q_heads, self.q_rows)

    def of_keys(self, x: Tensor) -> Item:
        return Item(x, lambda parcel: parcel.kv_rows, lambda parcel: parcel.kv_heads, self.kv_rows)

    def out(self, items: Sequence[Item], label: str) -> list[Tensor]:
        """Each item [B, all heads, own rows, D] as [B, own heads, the node's rows, D], rows in sequence order."""
        sends = {
            peer: [item.local[:, span(item.heads(self.plan.parcel(self.rank, peer)))] for item in items]
            for peer in self.peers
        }
        received = self.move(sends, lambda peer: self.plan.parcel(peer, self.rank), items, label)
        wholes = []
        for number, item in enumerate(items):
            own = self.plan.parcel(self.rank, self.rank)
            batch, heads, _, width = item.sizes(own)
            whole = item.local.new_empty(batch, heads, count(item.together), width)
            for peer, parts in received.items():
                place(whole, item.together, item.rows(self.plan.parcel(peer, self.rank)), parts[number])
            wholes.append(whole)
        return wholes

    def back(self, items: Sequence[Item], label: str) -> list[dict[int, Tensor]]:
        """Each item [B, own heads, the node's rows, D] as, by worker, [B, the worker's heads, own rows, D]."""
        sends = {
            peer: [rows_of(item.local, item.together, item.rows(self.plan.parcel(peer, self.rank))) for item in items]
            for peer in self.peers
        }
        received = self.move(sends, lambda peer: self.plan.parcel(self.rank, peer), items, label)
        return [{peer: parts[number] for peer, parts in received.items()} for number in range(len(items))]

    def move(
        self, sends: dict[int, list[Tensor]], parcel: Callable[[int], Parcel], items: Sequence[Item], label: str
    ) -> dict[int, list[Tensor]]:
        """From each rank of the node, this one included, a tensor per item; numbers of one dtype go in one message."""
        kept, outgoing, incoming = sends.pop(self.rank), [], []
        found: dict[int, dict[int, Tensor]] = {peer: {} for peer in sends}
        for dtype in dict.fromkeys(item.local.dtype for item in items):
            chosen = [i for i, item in enumerate(items) if item.local.dtype == dtype]
            for peer, tensors in sends.items():
                outgoing.append((peer, torch.cat([tensors[i].reshape(-1) for i in chosen])))
                sizes = [torch.Size(items[i].sizes(parcel(peer))) for i in chosen]
                numbers = [size.numel() for size in sizes]
                buffer = torch.empty(sum(numbers), dtype=dtype, device=items[0].local.device)
                incoming.append((peer, buffer))
                parts = zip(chosen, buffer.split(numbers), sizes, strict=True)
                found[peer] |= {i: part.view(size) for i, part, size in parts}
        self.mesh.exchange(outgoing, incoming, label).wait()
        ordered = {peer: [parts[i] for i in range(len(items))] for peer, parts in found.items()} | {self.rank: kept}
        return dict(sorted(ordered.items()))


def attend_heads(
    plan: HeadExchange, site: Attention, mesh: Mesh, given: Operands, between_nodes: Forward
) -> tuple[Tensor, Tensor]:
    """See attend.attend; the exchange of `site` is the one between nodes, and `between_nodes` runs it."""
    trade = Trade(plan, mesh)
    q, k, v = trade.out([trade.of_queries(given.q), *map(trade.of_keys, (given.k, given.v))], "forward out")
    own = replace(given, q=q, k=k, v=v)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    for part in plan.parts(mesh.rank):
        mine = span(part.queries, plan.share(mesh.rank).start)
        out[:, mine], lse[:, mine] = between_nodes(*between(plan, site, mesh, part), part_of(plan, mesh, own, part))
    outs, lses = trade.back([trade.of_queries(out), trade.of_queries(lse.unsqueeze(-1))], "forward back")
    return torch.cat([*outs.values()], 1), torch.cat([*lses.values()], 1).squeeze(-1)


def backward_heads(
    plan: HeadExchange, site: Attention, mesh: Mesh, dout: Tensor, saved: Saved, between_nodes: Backward
) -> AttentionGrads:
    """See attend.attend_backward."""
    trade, given = Trade(plan, mesh), saved.given
    queries, keys = (given.q, dout, saved.out, saved.lse.unsqueeze(-1)), (given.k, given.v)
    items = [*map(trade.of_queries, queries), *map(trade.of_keys, keys)]
    q, dout, out, lse, k, v = trade.out(items, "backward out")
    own = replace(given, q=q, k=k, v=v)
    total = AttentionGrads.zeros(own, site.learned)
    for part in plan.parts(mesh.rank):
        mine, theirs = span(part.queries, plan.share(mesh.rank).start), span(part.keys, plan.kv_share(mesh.rank).start)
        left = Saved(part_of(plan, mesh, own, part), out[:, mine], lse[:, mine].squeeze(-1))
        # Unnamed, so that nothing of it is held while the results go home.
        add(total, between_nodes(*between(plan, site, mesh, part), dout[:, mine], left).wait(), part, mine, theirs)
    home = [trade.of_queries(total.dq.to(q.dtype)), *map(trade.of_keys, (total.dk, total.dv))]
    dqs, dks, dvs = trade.back(home, "backward back")
    dk, dv = (summed(plan, *grads) for grads in ((dks, given.k), (dvs, given.v)))
    return AttentionGrads(torch.cat([*dqs.values()], 1), dk, dv, total.dsources, total.dsinks)


def add(total: AttentionGrads, found: AttentionGrads, part: Part, mine: slice, theirs: slice) -> None:
    """The gradients of a part, `mine` and `theirs` its query and KV heads among those of the rank, to all."""
    total.dq[:, mine] = found.dq
    total.dk[:, theirs] += found.dk
    total.dv[:, theirs] += found.dv
    for sum_, one in zip(total.dsources, found.dsources, strict=True):
        sum_ += one
    if total.dsinks is not None and found.dsinks is not None:
        total.dsinks[:, span(part.queries)] = found.dsinks


def between(plan: HeadExchange, site: Attention, mesh: Mesh, part: Part) -> tuple[Attention, Mesh]:
    """The attention of some heads, and the ranks that have them."""
    return replace(site, first_head=part.queries.start), SubMesh(mesh, plan.circle(mesh.rank))


def part_of(plan: HeadExchange, mesh: Mesh, own: Operands, part: Part) -> Operands:
    """Of the operands [B, own heads, the node's rows, D] the heads of `part`."""
    mine, theirs = span(part.queries, plan.share(mesh.rank).start), span(part.keys, plan.kv_share(mesh.rank).start)
    sinks = own.sinks[:, span(part.queries)] if own.sinks is not None else None
    return replace(own, q=own.q[:, mine], k=own.k[:, theirs], v=own.v[:, theirs], sinks=sinks)


def summed(plan: HeadExchange, grads: dict[int, Tensor], like: Tensor) -> Tensor:
    """[B, Hkv, own rows, D] from what each worker has of its KV heads: some have several workers."""
    total = torch.zeros(like.shape, dtype=accumulator(like.dtype), device=like.device)
    for worker, grad in grads.items():
        total[:, span(plan.kv_share(worker))] += grad
    return total


def span(heads: range, first: int = 0) -> slice:
    """`heads` of a tensor whose heads begin with `first`."""
    return slice(heads.start - first, heads.stop - first)


def place(whole: Tensor, together: Rows, rows: Rows, part: Tensor) -> None:
    """Writes the `rows` of a parcel where they are among those of the node."""
    here, local = Local(together), Local(rows)
    for piece in rows:
        whole[:, :, here.slice(piece)] = part[:, :, local.slice(piece)]


def rows_of(whole: Tensor, together: Rows, rows: Rows) -> Tensor:
    """The inverse of `place`."""
    here = Local(together)
    return torch.cat([whole[:, :, here.slice(piece)] for piece in rows], 2) if rows else whole[:, :, :0]
