"""Bytes that a rank sends by a plan: what a counter at the transport finds, to the byte."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringopt.attention.exchange import Cargo, Exchange
from ringopt.attention.heads import HeadExchange, Parcel
from ringopt.attention.rows import count
from ringopt.graph.sizes import at_hand
from ringopt.kernels.base import accumulator


@dataclass(frozen=True)
class Sizes:
    """Of the operands of an attention; `itemsize` and `wide` are bytes of a number, and of one in the accumulator."""

    batch: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    wide: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        numbers = (q.dtype.itemsize, accumulator(q.dtype).itemsize)
        batch, q_heads, kv_heads = map(at_hand, (q.shape[0], q.shape[1], k.shape[1]))
        return cls(batch, q_heads, kv_heads, k.shape[3], v.shape[3], *numbers)


def bytes_sent(plan: Exchange | HeadExchange, sizes: Sizes, rank: int, backward: bool = False) -> int:
    """By `rank` in the forward, or in the backward."""
    if isinstance(plan, HeadExchange):
        there = sum(
            there_bytes(plan.parcel(rank, other), sizes, backward) for other in range(plan.ranks) if other != rank
        )
        return there + sum(back_bytes(plan.parcel(o, rank), sizes, backward) for o in range(plan.ranks) if o != rank)
    if plan.merges:  # the sum of dQ is the caller's
        results = plan.pattern.q_length * sizes.batch * sizes.q_heads * (sizes.value_dim + 1) * sizes.wide
        return 0 if backward else results * (plan.ranks - 1)
    return sum(
        plan.sent_rows(rank, cargo, backward) * row_bytes(plan, sizes, cargo, backward)
        for cargo in (Cargo.OUT, Cargo.BACK)
    )


def row_bytes(plan: Exchange, sizes: Sizes, cargo: Cargo, backward: bool) -> int:
    """Of one row in a message: K and V, or their gradients; where queries move, Q (in the backward with the output, its
    gradient and the log-sum-exp), and back the output and the log-sum-exp, or dQ."""
    keys, values = sizes.key_dim, sizes.value_dim
    if not plan.queries_move:
        each = sizes.batch * sizes.kv_heads * (keys + values)
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
