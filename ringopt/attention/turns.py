"""Several exchanges at once, by turns: what one computes hides what the others have under way.

The heads of an attention know nothing of each other, so its exchange can be run as several, each of some of the heads,
and each a generator that stops where it would have to wait. What arrives is then computed with while the rest still
travels: at two ranks, where all that a rank is sent comes in one step, nothing else would hide the second half of it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from ringopt.attention.execute import (
    Attention,
    Found,
    Operands,
    Saved,
    attend_keys,
    backward_keys,
    post_first,
    wide_zeros,
)
from ringopt.attention.packing import Pair
from ringopt.attention.posted import Posted
from ringopt.distributed.mesh import Mesh
from ringopt.kernels.base import accumulator

T = TypeVar("T")
Turns = Generator[None, None, T]

MOST = 4  # exchanges
PIECE = 1 << 20  # bytes of the largest message of each: smaller ones cost more to handle than they hide


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


def finish(run: Turns[T]) -> T:
    """One that has nobody to take turns with."""
    return by_turns([run])[0]


def begin_groups(attention: Attention, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> list[Posted]:
    """What each exchange of `attend_groups` or `backward_groups` posts first, in the order in which they do."""
    groups = groups_of(attention, k, v)
    if len(groups) == 1:
        return [post_first(attention, mesh, k, v, backward)]
    return [
        post_first(attention, mesh, of(k, heads), of(v, heads), backward, f" of {number}")
        for number, heads in enumerate(groups)
    ]


def attend_groups(
    attention: Attention, mesh: Mesh, given: Operands, begun: Sequence[Posted] = ()
) -> tuple[Tensor, Tensor]:
    """K and V travel, in as many exchanges as pay; see run.attend."""
    groups = groups_of(attention, given.k, given.v)
    firsts: Sequence[Posted | None] = begun or [None] * len(groups)
    if len(groups) == 1:
        return finish(attend_keys(attention, mesh, given, first=firsts[0]))
    q, v = given.q, given.v
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))

    def one(number: int, heads: range) -> Turns[None]:
        (site, part), own = of_group(attention, given, heads), queries_of(given, heads)
        out[:, own], lse[:, own] = yield from attend_keys(site, mesh, part, f" of {number}", firsts[number])

    by_turns([one(number, heads) for number, heads in enumerate(groups)])
    return out, lse


def backward_groups(
    attention: Attention, mesh: Mesh, dout: Tensor, saved: Saved, begun: Sequence[Posted] = ()
) -> Found:
    """K and V travel again, and sums of dK and dV home; see run.attend_backward."""
    given, groups = saved.given, groups_of(attention, saved.given.k, saved.given.v)
    firsts: Sequence[Posted | None] = begun or [None] * len(groups)
    if len(groups) == 1:
        return finish(backward_keys(attention, mesh, dout, saved, first=firsts[0]))
    dq, homes = wide_zeros(given.q), Homes(given.k, given.v)

    def one(number: int, heads: range) -> Turns[Found]:
        (site, part), own = of_group(attention, given, heads), queries_of(given, heads)
        left, sums = Saved(part, saved.out[:, own], saved.lse[:, own]), (dq[:, own], lambda: homes.of(heads))
        # The home blocks of half of the groups hide the first hop of K and V, the others the last hop of dK and dV.
        how = (firsts[number], 2 * number < len(groups))
        return backward_keys(site, mesh, dout[:, own], left, f" of {number}", *sums, *how)

    found = by_turns([one(number, heads) for number, heads in enumerate(groups)])
    dsinks = [part.dsinks for part in found if part.dsinks is not None]
    return Found(dq, *homes.pair, [], torch.cat(dsinks, 1) if dsinks else None)


class Homes:
    """dK and dV of all heads, made when they are first needed."""

    def __init__(self, k: Tensor, v: Tensor):
        self._k, self._v = k, v

    @cached_property
    def pair(self) -> Pair:
        """To be read when `of` has been called for all heads."""
        dk, dv = (torch.empty(x.shape, dtype=accumulator(x.dtype), device=x.device) for x in (self._k, self._v))
        return dk, dv

    def of(self, heads: range) -> Pair:
        """Zeros for some heads: written no sooner than asked for, and until then a machine may give no memory."""
        dk, dv = self.pair
        return of(dk, heads).zero_(), of(dv, heads).zero_()


def groups_of(attention: Attention, k: Tensor, v: Tensor) -> list[range]:
    """The KV heads of each exchange; the same on every rank. One, where masks would have to be made for each."""
    exchange = attention.exchange
    heads = k.shape[1]
    if not heads or attention.mask.text or exchange.length == 0:
        return [range(heads)]
    number = exchanges_of(heads, k.shape[0] * heads * exchange.leaving * (k.shape[3] + v.shape[3]) * k.element_size())
    return [range(heads * i // number, heads * (i + 1) // number) for i in range(number)]


def exchanges_of(kv_heads: int, leaving: int) -> int:
    """How many exchanges pay, where `leaving` bytes of K and V leave a rank."""
    return max(1, min(MOST, kv_heads, leaving // PIECE))


def of_group(attention: Attention, given: Operands, heads: range) -> tuple[Attention, Operands]:
    """What the exchange of some KV heads is given."""
    own = queries_of(given, heads)
    sinks = given.sinks[:, own] if given.sinks is not None else None
    part = replace(given, q=given.q[:, own], k=of(given.k, heads), v=of(given.v, heads), sinks=sinks)
    return replace(attention, first_head=attention.first_head + own.start), part


def queries_of(given: Operands, heads: range) -> slice:
    """The query heads of some KV heads."""
    each = given.q.shape[1] // given.k.shape[1]
    return slice(heads.start * each, heads.stop * each)


def of(x: Tensor, heads: range) -> Tensor:
    return x[:, heads.start : heads.stop]
