"""What a plan costs on each rank: seconds, bytes, messages, FLOPs and memory, from the steps that will be run.

The executor's loop (executor/keys_move.py) on a clock and a ledger in place of tensors. A step ends when its blocks are
computed and its messages have come, and a message travels from when both ends have posted it; so a rank that computes
longer holds up those that wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from torch import Tensor

from ringopt.context_parallel.geometry.pattern import Kind, Pattern
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.exchange import Block, Cargo, Exchange, Step
from ringopt.context_parallel.plan.head_exchange import HeadExchange, Part
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.context_parallel.plan.tiling import pieces, placeless
from ringopt.cost.message_bytes import Sizes, back_bytes, bytes_sent, row_bytes, there_bytes, trade_bytes
from ringopt.hardware.rates import Rates

SHAPES = {Kind.FULL: "full", Kind.CAUSAL: "causal", Kind.PARTIAL: "masked"}


@dataclass(frozen=True)
class Heads(Sizes):
    """The sizes of an attention, its dtype (without "torch."), the kernel of its tiles, and the type of its device."""

    dtype: str
    kernel: str
    device: str = "cpu"

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, kernel: str = "") -> Heads:
        """Of q [B, Hq, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], which may be fake."""
        sizes = Sizes.of(q, k, v)
        dtype, device = str(q.dtype).removeprefix("torch."), q.device.type if q.device.type != "meta" else "cpu"
        return cls(**vars(sizes), dtype=dtype, kernel=kernel, device=device)

    def row(self, cargo: Cargo = Cargo.OUT) -> int:
        """Bytes of one row of K and V, or of their gradients, in a message."""
        elements = self.batch * self.kv_heads * (self.key_dim + self.value_dim)
        return elements * (self.itemsize if cargo is Cargo.OUT else self.wide)

    def travelling(self) -> tuple[int, int]:
        """Heads of what travels in the place of K and V, and bytes of one row of it."""
        return (1, self.latent * self.itemsize) if self.latent else (self.kv_heads, self.row())

    def plain(self) -> Heads:
        """The same with K and V that travel themselves."""
        return replace(self, latent=0, latent_flops=0)

    def making(self, rows: int, backward: bool) -> int:
        """FLOPs to make K and V of so many rows where they are used; in the backward with the gradients of that."""
        return rows * self.latent_flops * (3 if backward else 1)

    def query(self) -> int:
        """Bytes of one row of the output and its log-sum-exp, as sums."""
        return self.batch * self.q_heads * (self.value_dim + 1) * self.wide

    def flops(self, pairs: int, backward: bool) -> int:
        """Products of `pairs` of a query and a key, 2 a multiplication: QK^T and PV; backward QK^T again, dO V^T, P^T
        dO, dS K and dS^T Q."""
        width = 3 * self.key_dim + 2 * self.value_dim if backward else self.key_dim + self.value_dim
        return 2 * self.batch * self.q_heads * pairs * width

    def share(self, part: Part) -> Heads:
        """Of some of the heads."""
        return replace(self.plain(), q_heads=len(part.queries), kv_heads=len(part.keys))


@dataclass(frozen=True)
class SimSpan:
    """From `start` to `stop` seconds, `rank` computed its blocks of a step, or had its messages under way."""

    rank: int
    step: int
    kind: str  # "compute" or "exchange"
    start: float
    stop: float
    label: str = ""


@dataclass(frozen=True)
class Way:
    """Forward or backward, of all ranks: entry r is that of rank r. `seconds`: until the last rank is done; `exposed`:
    the part of them in which that rank waits for messages; `spans`: where they were asked for."""

    seconds: float
    exposed: float
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    messages: tuple[int, ...]
    spans: tuple[SimSpan, ...] = field(repr=False, default=())


@lru_cache(maxsize=1024)
def pairs_of(exchange: Exchange, rank: int) -> int:
    """Pairs of query and key that `rank` computes, for every head."""
    queries, keys = range(exchange.pattern.q_length), range(exchange.pattern.kv_length)
    if exchange.queries_move:
        return sum(exchange.pattern.pairs(queries, own) for own in exchange.kv_pieces(rank))
    return sum(exchange.pattern.pairs(own, keys) for own in exchange.q_pieces(rank))


def rows_made(blocks: Iterable[Block]) -> int:
    """Rows of K and V that a step computes with."""
    return sum(map(len, {block.keys for block in blocks}))


def flops_of(exchange: Exchange, heads: Heads, rank: int, backward: bool) -> int:
    """Of the products of `rank`; where K and V are made where they are used, of that too."""
    made = sum(rows_made(step.blocks) for step in exchange.steps(rank, backward)) if heads.latent else 0
    return heads.flops(pairs_of(exchange, rank), backward) + heads.making(made, backward)


def balance(exchange: Exchange) -> float:
    """Pairs of the busiest rank over the mean."""
    pairs = [pairs_of(exchange, rank) for rank in range(exchange.ranks)]
    return max(pairs) * len(pairs) / max(sum(pairs), 1)


@lru_cache(maxsize=1024)
def simulate(plan: Plan, heads: Heads, rates: Rates, backward: bool, drawn: bool = False) -> Way:
    """The plan of all ranks on a clock that starts at 0 on each; `drawn`: with its spans."""
    if isinstance(plan, HeadExchange):
        return trade(plan, heads, rates, backward, drawn)
    plans = [plan.steps(rank, backward) for rank in range(plan.ranks)]
    call = rates.call("queries" if plan.queries_move else "keys", backward)
    clocks, work = [call] * len(plans), [call] * len(plans)
    spans: list[SimSpan] = []
    for index in range(max(map(len, plans))):
        starts = list(clocks)
        for rank, steps in enumerate(plans):
            if index >= len(steps):
                continue
            step = steps[index]
            compute = sum(block_seconds(plan, block, heads, rates, backward) for block in step.blocks)
            compute += heads.making(rows_made(step.blocks), backward) / rates.default.rate
            exchange, messages = traffic(plan, step, heads, rates, backward)
            # Both ends must have posted a message before it travels.
            late = max([starts[m.source] - starts[rank] for m in step.receives], default=0.0)
            clocks[rank] += rates.step_seconds(compute, exchange + max(late, 0.0) if messages else 0.0)
            work[rank] += compute + rates.step
            if drawn:
                spans += spans_of(rank, index, starts[rank], compute, exchange, step)
    everyone = range(plan.ranks)
    last = max(everyone, key=clocks.__getitem__)
    return Way(
        clocks[last],
        clocks[last] - work[last],
        tuple(flops_of(plan, heads, rank, backward) for rank in everyone),
        tuple(bytes_sent(plan, heads, rank, backward) for rank in everyone),
        tuple(sum(len(step.sends) for step in steps) for steps in plans),
        tuple(spans),
    )


def trade(plan: HeadExchange, heads: Heads, rates: Rates, backward: bool, drawn: bool) -> Way:
    """All heads of the node's rows there, the rank's share of them by the plan between nodes, all results back; one
    after the other. A rank has one message for each other of its node, two where the log-sum-exp has another dtype than
    the rest."""
    everyone = range(plan.ranks)
    kinds = 1 if heads.itemsize == heads.wide else 2
    messages = (plan.node - 1) * ((kinds if backward else 1) + kinds)
    exchange = max(trade_seconds(plan, heads, rates, rank, messages, backward) for rank in everyone)
    shares = [[heads.share(part) for part in plan.parts(place)] for place in range(plan.node)]
    circle = rates.every(plan.node)
    ways = [[simulate(plan.whole, share, circle, backward, drawn) for share in own] for own in shares]
    call = rates.call("keys", backward)  # which is part of that of heads
    took = [sum(way.seconds - call for way in own) for own in ways]
    slowest = max(range(plan.node), key=took.__getitem__)
    own_ways = [[(way, rank // plan.node) for way in ways[rank % plan.node]] for rank in everyone]
    half, spans = exchange / 2, list[SimSpan]()
    for rank, own in enumerate(own_ways if drawn else ()):
        start = half
        spans.append(SimSpan(rank, 0, "exchange", 0.0, half, "rows for heads"))
        for way, node in own:
            mine = (span for span in way.spans if span.rank == node)
            spans += [replace(x, rank=rank, step=x.step + 1, start=start + x.start, stop=start + x.stop) for x in mine]
            start += way.seconds - call
        last = max(span.step for span in spans if span.rank == rank)
        spans.append(
            SimSpan(rank, last + 1, "exchange", half + took[slowest], exchange + took[slowest], "results for rows")
        )
    return Way(
        rates.call("heads", backward) + exchange + took[slowest] + 2 * rates.step,
        exchange + sum(way.exposed for way in ways[slowest]),
        tuple(sum(way.flops[node] for way, node in own) for own in own_ways),
        tuple(bytes_sent(plan, heads, rank, backward) for rank in everyone),
        tuple(messages + sum(way.messages[node] for way, node in own) for own in own_ways),
        tuple(spans),
    )


def trade_seconds(plan: HeadExchange, heads: Heads, rates: Rates, rank: int, messages: int, backward: bool) -> float:
    """Of the rank's messages to the ranks that it trades with, as many to each, over the links that lead there; and of
    what it packs and puts together: each once, results twice, and gradients are summed too."""
    others = [other for other in plan.peers(rank) if other != rank]
    sizes = trade_bytes(plan, heads, rank, backward)
    seconds = 0.0
    for of, away in ((rates, False), (rates.beyond, True)):
        there = [other for other in others if rates.crosses(rank, other) is away]
        size, share = sum(sizes[other] for other in there), messages * len(there) // max(len(others), 1)
        seconds = max(seconds, of.exchange_seconds(size, share))
    parcels = [plan.parcel(home, rank) for home in plan.peers(rank)]
    own = sum(there_bytes(parcel, heads, backward) for parcel in parcels)
    results = sum(back_bytes(parcel, heads, backward) for parcel in parcels)
    copied = sum(sizes.values()) + own + (4 if backward else 2) * results
    return seconds + 2 * copied / rates.touch  # read and written


def spans_of(rank: int, index: int, start: float, compute: float, exchange: float, step: Step) -> Iterator[SimSpan]:
    """The computation and the exchange of one step as bars of a timeline, which begin at `start` seconds."""
    if compute:
        owners = ",".join(str(block.keys.start) for block in step.blocks[:1])
        yield SimSpan(rank, index, "compute", start, start + compute, f"keys {owners}+")
    if exchange:
        sources = ",".join(sorted({str(m.source) for m in step.receives}))
        yield SimSpan(rank, index, "exchange", start, start + exchange, f"from {sources}" if sources else "send")


def traffic(exchange: Exchange, step: Step, heads: Heads, rates: Rates, backward: bool) -> tuple[float, int]:
    """Seconds and messages of a step: of what is sent and what is received, as the link carries both directions; and
    the longer of what stays in the node and what leaves it, for these are two links."""
    row, tiers = row_bytes_by_cargo(exchange, heads, backward), ((rates, False), (rates.beyond, True))
    seconds = 0.0
    for of, away in tiers:
        ways = [[m for m in way if rates.crosses(m.source, m.target) is away] for way in (step.sends, step.receives)]
        there, back = (of.exchange_seconds(sum(count(m.rows) * row[m.cargo] for m in way), len(way)) for way in ways)
        seconds = max(seconds, of.two_ways(there, back))
    return seconds, max(len(step.sends), len(step.receives))


def row_bytes_by_cargo(exchange: Exchange, heads: Heads, backward: bool) -> dict[Cargo, int]:
    """Bytes of one row in a message."""
    return {cargo: row_bytes(exchange, heads, cargo, backward) for cargo in Cargo}


def block_seconds(exchange: Exchange, block: Block, heads: Heads, rates: Rates, backward: bool) -> float:
    """Of one block, in the pieces in which it is computed."""
    return seconds_of(exchange.pattern, placeless(exchange.pattern, block), heads, rates, backward)


@lru_cache(maxsize=4096)
def seconds_of(pattern: Pattern, block: Block, heads: Heads, rates: Rates, backward: bool) -> float:
    """Seconds of the tiles of one block."""
    found = pieces(pattern, block, heads.kernel)
    return sum(tile_seconds(pattern, piece, heads, rates, backward) for piece in found)


def tile_seconds(pattern: Pattern, tile: Block, heads: Heads, rates: Rates, backward: bool) -> float:
    """Its products, and what it gives added to the sums. A tile with a mask computes all its pairs."""
    queries, keys = len(tile.queries), len(tile.keys)
    causal = tile.kind is Kind.CAUSAL
    pairs = pattern.pairs(tile.queries, tile.keys) if causal else queries * keys
    speed = rates.tile(heads.kernel, heads.dtype, backward, SHAPES[tile.kind])
    merged = 3 * (queries * heads.query() + (2 * keys * heads.row(Cargo.BACK) if backward else 0))
    rows = queries * heads.batch * heads.q_heads
    return speed.seconds(heads.flops(pairs, backward), rows) + merged / rates.touch
