"""Bytes that a rank sends by a plan: what a counter at the transport finds, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.exchange import Cargo, Exchange
from ringopt.context_parallel.plan.head_exchange import HeadExchange, Parcel
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.kernels.base import accumulator


@dataclass(frozen=True)
class Sizes:
    """Of the operands of an attention; `itemsize` and `wide` are bytes of a number, and of one in the accumulator.
    `latent`: where K and V are made where they are used, numbers of a row of what travels in their place, of all batch
    rows; `latent_flops`: to make K and V of such a row."""

    batch: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    wide: int
    latent: int = field(default=0, kw_only=True)
    latent_flops: int = field(default=0, kw_only=True)

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        numbers = (q.dtype.itemsize, accumulator(q.dtype).itemsize)
        batch, q_heads, kv_heads = map(at_hand, (q.shape[0], q.shape[1], k.shape[1]))
        return cls(batch, q_heads, kv_heads, at_hand(k.shape[3]), at_hand(v.shape[3]), *numbers)


def bytes_sent(plan: Exchange | HeadExchange, sizes: Sizes, rank: int, backward: bool = False) -> int:
    """By `rank` in the forward, or in the backward."""
    return sum(size for _target, size in sent_to(plan, sizes, rank, backward))


def bytes_between(plan: Exchange | HeadExchange, sizes: Sizes, rank: int, node: int, backward: bool = False) -> int:
    """Of these, the ones that leave the node, where each `node` ranks in a row are one."""
    away = (size for target, size in sent_to(plan, sizes, rank, backward) if target // node != rank // node)
    return sum(away)


def sent_to(plan: Exchange | HeadExchange, sizes: Sizes, rank: int, backward: bool) -> Iterator[tuple[int, int]]:
    """Targets of what `rank` sends, with bytes."""
    if isinstance(plan, HeadExchange):
        yield from trade_bytes(plan, sizes, rank, backward).items()
        share, circle = replace(sizes, kv_heads=len(plan.kv_share(rank)), latent=0), plan.circle(rank)
        for target, size in sent_to(plan.whole, share, rank // plan.node, backward):
            yield circle[target], size
    elif plan.merges:  # the sum of dQ is the caller's
        results = plan.pattern.q_length * sizes.batch * sizes.q_heads * (sizes.value_dim + 1) * sizes.wide
        yield from ((other, 0 if backward else results) for other in range(plan.ranks) if other != rank)
    else:
        row = {cargo: row_bytes(plan, sizes, cargo, backward) for cargo in Cargo}
        for step in plan.steps(rank, backward):
            yield from ((m.target, count(m.rows) * row[m.cargo]) for m in step.sends)


def trade_bytes(plan: HeadExchange, sizes: Sizes, rank: int, backward: bool) -> dict[int, int]:
    """To each rank that `rank` trades rows for heads with, there and back."""
    return {
        other: there_bytes(plan.parcel(rank, other), sizes, backward)
        + back_bytes(plan.parcel(other, rank), sizes, backward)
        for other in plan.peers(rank)
        if other != rank
    }


def row_bytes(plan: Exchange, sizes: Sizes, cargo: Cargo, backward: bool) -> int:
    """Of one row in a message: K and V, or their gradients; where queries move, Q (in the backward with the output, its
    gradient and the log-sum-exp), and back the output and the log-sum-exp, or dQ."""
    keys, values = sizes.key_dim, sizes.value_dim
    if not plan.queries_move:
        each = sizes.latent or sizes.batch * sizes.kv_heads * (keys + values)
        return each * (sizes.itemsize if cargo is Cargo.OUT else sizes.wide)
    if cargo is Cargo.OUT:
        number = (keys + 2 * backward * values) * sizes.itemsize + backward * sizes.wide
    else:
        number = (keys if backward else values + 1) * sizes.wide
    return sizes.batch * sizes.q_heads * number


def there_bytes(parcel: Parcel, sizes: Sizes, backward: bool) -> int:
    """Q, K, V; in the backward also the output, its gradient and the log-sum-exp."""
    queries, keys = count(parcel.q_rows) * len(parcel.q_heads), count(parcel.kv_rows) * len(parcel.kv_heads)
    numbers = queries * (sizes.key_dim + 2 * backward * sizes.value_dim) + keys * (sizes.key_dim + sizes.value_dim)
    return sizes.batch * (numbers * sizes.itemsize + backward * queries * sizes.wide)


def back_bytes(parcel: Parcel, sizes: Sizes, backward: bool) -> int:
    """The output and the log-sum-exp; in the backward dQ, and dK and dV, which are sums over ranks."""
    queries, keys = count(parcel.q_rows) * len(parcel.q_heads), count(parcel.kv_rows) * len(parcel.kv_heads)
    if backward:
        wide = keys * (sizes.key_dim + sizes.value_dim)
        return sizes.batch * (queries * sizes.key_dim * sizes.itemsize + wide * sizes.wide)
    return sizes.batch * queries * (sizes.value_dim * sizes.itemsize + sizes.wide)
