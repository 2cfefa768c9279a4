"""Several exchanges at once, by turns: what one computes hides what the others have under way.

The heads of an attention know nothing of each other, and what a query has of some keys is merged with what it has of
others. So an exchange can be run as several, each of some of the heads or, where these do not suffice, of some of the
rows of every rank; and each a generator that stops where it would have to wait. What arrives is then computed with
while the rest still travels: at two ranks, where all that a rank is sent comes in one step, nothing else would hide the
second half of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Pair
from ringopt.context_parallel.executor.keys_move import (
    Attending,
    Attention,
    Coming,
    Found,
    KeysMove,
    Operands,
    Saved,
    post_first,
    spread_nan,
    spread_nan_to_keys,
    wide_zeros,
)
from ringopt.context_parallel.executor.merge_lse import Merged
from ringopt.context_parallel.executor.messages import Posted
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.prove import prove
from ringopt.distributed.mesh import Mesh, Pending
from ringopt.kernels.base import HIDDEN

T = TypeVar("T")
Turns = Generator[None, None, T]

MOST = 8  # exchanges
PIECE = 1 << 19  # bytes of the largest message of each: smaller ones cost more to handle than they hide
ROWS = 2048  # keys of each, where several share heads: what more of them cost is one more merge of all results


@dataclass(frozen=True)
class Share:
    """What one of several exchanges carries: some KV heads, and of these all keys or a part (Exchange.parts)."""

    heads: range
    exchange: Exchange
    name: str = ""  # in labels


def by_turns(runs: Sequence[Turns[T]]) -> list[T]:
    """What each returns. The order in which they go on is that of `runs`, on every rank."""
    found: dict[int, T] = {}
    while len(found) < len(runs):
        for place, run in enumerate(runs):
            if place not in found:
                try:
                    next(run)
                except StopIteration as done:
                    found[place] = done.value
    return [found[place] for place in range(len(runs))]


def begin_shares(attention: Attention, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> list[Posted]:
    """What each exchange of `attend_shares` or `backward_shares` posts first, in the order in which they do."""
    return post_shares(attention, mesh, shares_of(attention, k, v, mesh.rank), k, v, backward)


def post_shares(
    attention: Attention, mesh: Mesh, shares: Sequence[Share], k: Tensor, v: Tensor, backward: bool
) -> list[Posted]:
    found = []
    for share in shares:
        site, own = replace(attention, exchange=share.exchange), (of(k, share.heads), of(v, share.heads))
        found.append(post_first(site, mesh, *own, backward, share.name))
    return found


def attend_shares(
    attention: Attention, mesh: Mesh, given: Operands, begun: Sequence[Posted] = ()
) -> tuple[Tensor, Tensor]:
    """K and V travel, in as many exchanges as pay; see run.attend."""
    shares = shares_of(attention, given.k, given.v, mesh.rank)
    firsts = begun or post_shares(attention, mesh, shares, given.k, given.v, backward=False)
    merged = Merged(given.q, given.v.shape[3])
    home = Attending(attention, mesh, given, merged)
    home.at_home()

    def one(share: Share, first: Posted) -> Turns[None]:
        if len(shares) == 1:
            return home.away(first)
        site, part = of_share(attention, given, share)
        return Attending(site, mesh, part, merged.of(queries_of(given, share.heads))).away(first, share.name)

    by_turns([one(share, first) for share, first in zip(shares, firsts, strict=True)])
    return home.tiles.completed(merged, given.sinks)


def backward_shares(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> Homeward:
    """K and V travel again, and sums of dK and dV home, but for the last of them; see run.attend_backward."""
    given, shares = saved.given, shares_of(attention, saved.given.k, saved.given.v, mesh.rank)
    firsts = begun or post_shares(attention, mesh, shares, given.k, given.v, backward=True)
    dq, homes = wide_zeros(given.q), Homes(given.k, given.v)
    parts = [wide_zeros(given.sources[i]) for i in attention.learned]

    made: dict[tuple[range, tuple[int, int]], KeysMove] = {}

    def blocks(share: Share) -> KeysMove:
        heads, key = share.heads, (share.heads, share.exchange.part)
        if key not in made:
            (site, part), own = of_share(attention, given, share), queries_of(given, heads)
            left = Saved(part, saved.out[:, own], saved.lse[:, own])
            made[key] = KeysMove(site, mesh, dout[:, own], left, dq[:, own], parts, lambda: homes.of(heads))
        return made[key]

    # Half of the home blocks hide the first hop of K and V, the others the last hop of dK and dV.
    early, late = halves(attention, shares)
    for share in early:
        blocks(share).at_home("backward 0")
    coming = by_turns([blocks(share).away(first, share.name) for share, first in zip(shares, firsts, strict=True)])
    for share in late:
        blocks(share).at_home("backward home")

    hidden = saved.lse == HIDDEN if attention.nan_rows else None
    if hidden is not None and not attention.mask.stops:
        spread_nan(dq, parts, hidden)
    once = {share.heads: blocks(share) for share in shares}
    dsinks = [part for some in once.values() if (part := some.dsinks()) is not None]
    return Homeward(
        dq, parts, torch.cat(dsinks, 1) if dsinks else None, Keys(mesh, homes, coming, hidden, attention.mask.stops)
    )


@dataclass(frozen=True)
class Homeward:
    """A backward of which all is computed, and the last sums of dK and dV are on their way here. Gradients are in the
    accumulator's dtype."""

    dq: Tensor
    parts: Sequence[Tensor]
    dsinks: Tensor | None
    keys: Keys

    def found(self) -> Found:
        return Found(self.dq, *self.keys.arrive(), self.parts, self.dsinks)


@dataclass(frozen=True)
class Keys:
    """The part of it that is not here yet."""

    mesh: Mesh
    homes: Homes
    coming: Sequence[Coming]
    hidden: Tensor | None  # rows whose gradients are NaN for all values, and for all keys unless
    stops: bool

    @property
    def pending(self) -> list[Pending]:
        return [posted.pending for each in self.coming for posted in each.last]

    def arrive(self) -> Pair:
        """dK and dV, once. Raises RingCommError."""
        for each in self.coming:
            each.arrive()
        dk, dv = self.homes.pair
        if self.hidden is not None:
            spread_nan_to_keys([dv] if self.stops else [dk, dv], self.mesh, self.hidden)
        return dk, dv


class Homes:
    """dK and dV of all heads, zeros that are made when they are first needed."""

    def __init__(self, k: Tensor, v: Tensor):
        self._k, self._v = k, v

    @cached_property
    def pair(self) -> Pair:
        return wide_zeros(self._k), wide_zeros(self._v)

    def of(self, heads: range) -> Pair:
        dk, dv = self.pair
        return of(dk, heads), of(dv, heads)


def shares_of(attention: Attention, k: Tensor, v: Tensor, rank: int) -> list[Share]:
    """The exchanges of an attention, each proved for `rank`; the same on every rank. Of all heads, where masks would
    have to be made for each."""
    exchange, heads = attention.exchange, k.shape[1]
    size = k.shape[0] * heads * exchange.leaving * (k.shape[3] + v.shape[3]) * k.element_size()
    alike = 1 if attention.mask.text else heads
    apart, parts = exchanges_of(alike, exchange.leaving, size) if exchange.length else (1, 1)
    shares: list[Share] = []
    prove(exchange, rank)
    for i in range(apart):
        for part in exchange.parts(parts):
            prove(part, rank)
            name = f" of {len(shares)}" if apart * parts > 1 else ""
            shares.append(Share(range(heads * i // apart, heads * (i + 1) // apart), part, name))
    return shares


def halves(attention: Attention, shares: Sequence[Share]) -> tuple[list[Share], list[Share]]:
    """The rank's own keys in two: by heads, as many at once as the exchanges have, or by rows. Of a single exchange,
    nothing and all."""
    exchange, ranges = attention.exchange, list(dict.fromkeys(share.heads for share in shares))
    if len(shares) == 1:
        return [], [Share(ranges[0], exchange)]
    pieces = [Share(heads, exchange) for heads in ranges]
    if len(pieces) == 1:
        pieces = [Share(ranges[0], part) for part in exchange.parts(2)]
    return pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]


def exchanges_of(kv_heads: int, rows: int, size: int) -> tuple[int, int]:
    """How many exchanges pay, by heads and by rows, where `size` bytes of K and V leave a rank, in `rows` rows."""
    most = max(1, min(MOST, size // PIECE))
    apart = max(1, min(most, kv_heads))
    return apart, max(1, min(most // apart, rows // ROWS))


def of_share(attention: Attention, given: Operands, share: Share) -> tuple[Attention, Operands]:
    """What one of the exchanges is given."""
    heads = share.heads
    own = queries_of(given, heads)
    sinks = given.sinks[:, own] if given.sinks is not None else None
    part = replace(given, q=given.q[:, own], k=of(given.k, heads), v=of(given.v, heads), sinks=sinks)
    return replace(attention, exchange=share.exchange, first_head=attention.first_head + own.start), part


def queries_of(given: Operands, heads: range) -> slice:
    """The query heads of some KV heads."""
    each = given.q.shape[1] // given.k.shape[1]
    return slice(heads.start * each, heads.stop * each)


def of(x: Tensor, heads: range) -> Tensor:
    return x[:, heads.start : heads.stop]
