"""Into how many exchanges an attention is cut, so that what one computes hides what the others have under way.

The heads of an attention know nothing of each other, and what a query has of some keys is merged with what it has of
others. So an exchange can be run as several, each of some of the KV heads or, where these do not suffice, of some of
the keys of every rank; the executor lets them take turns (executor/interleave.py). What arrives is then computed with
while the rest still travels: at two ranks, where all that a rank is sent comes in one step, nothing else would hide the
second half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.context_parallel.plan.head_exchange import HeadExchange, prove_heads
from ringopt.context_parallel.plan.posting_order import batches, check_order
from ringopt.context_parallel.plan.prove import prove
from ringopt.hardware.devices import limits_of

ROWS = 2048  # keys of each, where several share heads: what more of them cost is one more merge of all results


@dataclass(frozen=True)
class KVSizes:
    """Of K and V that a rank holds: their heads, and the bytes of one token of one head, of all batch rows. `cut`:
    whether the heads may be cut; not where a mask of the program would have to be made for each. `device`: the type of
    that which holds them."""

    heads: int
    token_bytes: int
    cut: bool = True
    device: str = "cpu"


@dataclass(frozen=True)
class SubExchange:
    """What one of several exchanges carries: some KV heads, and of these all keys or a part (Exchange.parts)."""

    heads: range
    exchange: Exchange
    name: str = field(default="", compare=False)  # in labels


def exchanges_of(kv_heads: int, rows: int, size: int, device: str = "cpu") -> tuple[int, int]:
    """How many exchanges pay, by heads and by rows, where `size` bytes of K and V leave a rank, in `rows` rows."""
    limits = limits_of(device)
    most = max(1, min(limits.exchanges, size // limits.message))
    apart = max(1, min(most, kv_heads))
    return apart, max(1, min(most // apart, rows // ROWS))


def sub_exchanges(exchange: Exchange, sizes: KVSizes) -> list[SubExchange]:
    """The exchanges of an attention in which K and V travel; the same on every rank."""
    heads, leaving = sizes.heads, exchange.leaving
    apart, parts = (1, 1)
    if exchange.length:
        size = heads * leaving * sizes.token_bytes
        apart, parts = exchanges_of(heads if sizes.cut else 1, leaving, size, sizes.device)
    found: list[SubExchange] = []
    for i in range(apart):
        for part in exchange.parts(parts):
            name = f" of {len(found)}" if apart * parts > 1 else ""
            found.append(SubExchange(range(heads * i // apart, heads * (i + 1) // apart), part, name))
    return found


def home_halves(exchange: Exchange, cut: Sequence[SubExchange]) -> tuple[list[SubExchange], list[SubExchange]]:
    """The rank's own keys in two: by heads, as many at once as the exchanges have, or by rows. Of a single exchange,
    nothing and all."""
    ranges = list(dict.fromkeys(sub.heads for sub in cut))
    if len(cut) == 1:
        return [], [SubExchange(ranges[0], exchange)]
    pieces = [SubExchange(heads, exchange) for heads in ranges]
    if len(pieces) == 1:
        pieces = [SubExchange(ranges[0], part) for part in exchange.parts(2)]
    return pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]


def prove_plan(plan: Exchange | HeadExchange, sizes: KVSizes, rank: int) -> None:
    """Proves what `rank` is about to run of `plan`: the whole of it, each of the exchanges that it is cut into, and the
    order in which their messages are posted. Raises PlanError. What has been proved is remembered."""
    if isinstance(plan, HeadExchange):
        prove_heads(plan, rank)
        for part in plan.parts(rank):
            own = replace(sizes, heads=len(part.keys))
            _prove_parts(plan.whole, own, rank // plan.node)
        return
    prove(plan, rank)
    if plan.queries_move:
        _prove_order((plan,), rank)
    else:
        _prove_parts(plan, sizes, rank)


def _prove_parts(exchange: Exchange, sizes: KVSizes, rank: int) -> None:
    cut = tuple(sub.exchange for sub in sub_exchanges(exchange, sizes))
    distinct = tuple(dict.fromkeys(cut))  # exchanges of other heads differ in nothing but their turns
    for part in distinct:
        prove(part, rank)
    _prove_order(distinct, rank)


@lru_cache(maxsize=1024)
def _prove_order(cut: tuple[Exchange, ...], rank: int) -> None:
    for backward in (False, True):
        check_order(rank, partial(batches, cut, backward=backward))
