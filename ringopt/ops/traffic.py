"""Bytes that a rank sends when an operator runs, as distributed/mesh.py counts them, and bytes that it holds meanwhile:
the formulas behind the table of traits (traits.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.dilated import DilatedPlan, dilated_plan_of
from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Message
from ringopt.context_parallel.plan.plan_of import Plan, plan_of
from ringopt.cost.dilated import dilated_bytes
from ringopt.cost.message_bytes import bytes_sent
from ringopt.cost.simulate import Heads
from ringopt.expr.mask import Mask
from ringopt.kernels.base import accumulator
from ringopt.ops.all_to_all import bytes_turned
from ringopt.ops.expansion import expansion_of
from ringopt.ops.fetch_rows import Fetch, Wanted, fetch_of
from ringopt.ops.reshard import plan_respread
from ringopt.ops.scan_sizes import (
    ends_bytes,
    gradients_bytes,
    kernel_gradients_bytes,
    kernel_maps_bytes,
    maps_again_bytes,
    maps_bytes,
    states_bytes,
)
from ringopt.ops.sized_call import SizedCall

CPU = torch.device("cpu")
LOOKED_AT = 8  # ranks at most; of more, the others are like these


@dataclass(frozen=True)
class Sending:
    """What a rank sends for one operator, at the size that was traced and at others.

    how     "reduced": a value of `bytes`, by a ring; "gathered": rows of `bytes` each, of a sequence of `length`;
            "told": `bytes` to each other rank; "turned": `bytes` in all where there are `ranks`, a message between each
            two of them; "moved": `bytes` in all
    grows   whether `bytes` are in proportion to the sequence; rows that cross the edges of shards are not
    bound   that rows that are only known when the program runs are taken to lie all on this rank
    """

    how: Literal["reduced", "gathered", "told", "turned", "moved"]
    bytes: int
    length: int = 0
    layout: str = "contiguous"
    grows: bool = False
    bound: bool = False
    ranks: int = 0

    def at(self, ranks: int, scale: float = 1.0) -> int:
        size = round(self.bytes * scale) if self.grows else self.bytes
        if self.how == "reduced":
            return 2 * size * (ranks - 1) // ranks
        if self.how == "gathered":
            return size * layout_of(self.layout, max(round(self.length * scale), 1), ranks).most * (ranks - 1)
        if self.how == "turned":
            return size * (ranks - 1) * self.ranks**2 // ((self.ranks - 1) * ranks**2)
        return size * (ranks - 1) if self.how == "told" else size


# ---- sums and gathers ------------------------------------------------------------------------------------------------
def summed(call: SizedCall) -> Sending:
    """An all-reduce of the operand."""
    size = call["x"].bytes
    return Sending("reduced", size, grows=size > 8 * call.rows)


def bucket(call: SizedCall) -> Sending:
    """One message; those of parameters do not grow."""
    return Sending("reduced", sum(x.bytes for x in call["grads"]))


def gathered(call: SizedCall) -> Sending:
    """Shards, padded to the longest."""
    row = call["x"].place(call["dim"]) * call["outer"] * call["inner"]
    return Sending("gathered", row, call["length"], call["layout"])


def extremes(call: SizedCall) -> Sending:
    """An all-gather of each rank's extremes: the size of the result."""
    size = call.result.bytes
    return Sending("told", size, grows=size > 8 * call.rows)


def sums_of_chunks(call: SizedCall) -> Sending:
    """An all-gather of one sum a chunk of the layout."""
    chunks = layout_of(call["layout"], call["length"], call.ranks).chunks_per_rank
    return Sending("told", call["x"].place(call["dim"]) * chunks)


def looked_up(call: SizedCall) -> Sending:
    """Who has the rows is not known; the rank that has most sends no more than if it had all."""
    return Sending("told", call.result.bytes, bound=True)


# ---- rows that change ranks ------------------------------------------------------------------------------------------
def fetch_plan(call: SizedCall, form: str) -> Fetch:
    """The plan by which tokens of form `form` are fetched; the length is specialised."""
    length = call["length"]
    call.unrolled(length)
    return fetch_of(Wanted.of(form, call["numbers"]), call["layout"], length, call.ranks, call.rank, CPU)


def rows_in(messages: Any) -> int:
    """Tokens in messages of (peer, tokens)."""
    return sum(len(rows) for _peer, rows in messages)


def moved(call: SizedCall, sent: int) -> Sending:
    """Much of a value grows with it."""
    return Sending("moved", sent, grows=4 * sent > call.result.bytes, ranks=call.ranks)


def fetched(call: SizedCall) -> Sending:
    """Tokens fetched from their ranks."""
    row = call["x"].place(call["dim"]) * call["outer"] * call["inner"]
    return moved(call, rows_in(fetch_plan(call, call["form"]).sends) * row)


def returned(call: SizedCall) -> Sending | None:
    """Gradients of fetched tokens, sent back; nothing for tokens that every rank fetches, whose gradients are
    summed."""
    if Wanted.of(call["form"], call["numbers"]).everywhere:
        return None
    row = call["grad"].place(call["dim"]) * call["outer"] * call["inner"]
    return moved(call, rows_in(fetch_plan(call, call["form"]).receives) * row)


def windows_fetched(call: SizedCall) -> Sending:
    """The halo of a convolution."""
    return moved(call, rows_in(fetch_plan(call, "halo").sends) * call["x"].place(call["dim"]))


def windows_fetched_again(call: SizedCall) -> Sending:
    """And their gradients returned."""
    plan = fetch_plan(call, "halo")
    return moved(call, (rows_in(plan.sends) + rows_in(plan.receives)) * call["x"].place(call["dim"]))


def respread(call: SizedCall) -> Sending:
    """Tokens whose rank differs between two placements."""
    old, new = tuple(call["old"]), tuple(call["new"])
    call.unrolled(prod(old))
    plan = plan_respread(old, new, call["old_layout"], call["new_layout"], call.ranks, call.rank, CPU)
    return moved(call, rows_in(plan.sends) * call["x"].place(call["dim"]))


def turned(call: SizedCall) -> Sending | None:
    """An all-to-all between the sequence and another dim; nothing on one rank."""
    sent = bytes_turned(call["x"].bytes, call["new"], call["new_layout"], call.ranks, call.rank)
    return Sending("turned", sent, grows=4 * sent > call.result.bytes, ranks=call.ranks) if sent else None


# ---- attention -------------------------------------------------------------------------------------------------------
def heads_of(call: SizedCall) -> Heads:
    """The sizes of an attention: batch, heads, head dims, bytes an element, kernel."""
    q, k, v = (call[name] for name in "qkv")
    given = Heads(
        batch=q.size(0),
        q_heads=q.size(1),
        kv_heads=k.size(1),
        key_dim=k.size(3),
        value_dim=v.size(3),
        itemsize=k.dtype.itemsize,
        wide=accumulator(k.dtype).itemsize,
        dtype=str(k.dtype).removeprefix("torch."),
        kernel=call.arguments.get("kernel", ""),
    )
    how = call.arguments.get("expand", "")
    return expansion_of(how).expanded(given) if how else given


def ring_plan(call: SizedCall) -> Plan:
    """Of a ring_attention or its backward. Raises PlanError, OptionError."""
    q_length, kv_length = call["q_length"], call["kv_length"]
    sharded = ShardedPattern(call["pattern"], q_length, kv_length, call.ranks, call["q_layout"], call["kv_layout"])
    heads = (call["q"].size(1), call["k"].size(1))
    return plan_of(sharded, call["strategy"], heads, Mask.parse(call["mask"]))


def dilated_plan(call: SizedCall) -> DilatedPlan:
    """Of a dilated_attention or its backward; of an attention on one device too. Raises PlanError, OptionError."""
    heads = (call["q"].size(1), call["k"].size(1))
    if "length" not in call.arguments:
        return dilated_plan_of(call["pattern"], call["q"].size(2), heads, 1, "contiguous", "auto")
    return dilated_plan_of(call["pattern"], call["length"], heads, call.ranks, call["layout"], call["strategy"])


def seed_compared(call: SizedCall) -> int:
    """At every call with dropout, the ranks compare their seeds."""
    return 8 * (call.ranks - 1) if call.arguments["seed"] is not None else 0


def seeds_compared(call: SizedCall) -> Sending:
    """At every call of a program that draws, each rank tells the others its seeds."""
    return Sending("told", call["given"].bytes)


def ring(call: SizedCall) -> Sending:
    """Messages of the forward plan, and the comparison of a dropout seed."""
    return Sending("moved", bytes_sent(ring_plan(call), heads_of(call), call.rank) + seed_compared(call), grows=True)


def ring_back(call: SizedCall) -> Sending:
    """Messages of the backward plan."""
    return Sending("moved", bytes_sent(ring_plan(call), heads_of(call), call.rank, True), grows=True)


def dilated(call: SizedCall) -> Sending:
    """Messages of all terms, and the comparison of a dropout seed."""
    sent = dilated_bytes(dilated_plan(call), heads_of(call), call.rank, False)
    return Sending("moved", sent + seed_compared(call), grows=True)


def dilated_back(call: SizedCall) -> Sending:
    """Messages of the backward of all terms."""
    return Sending("moved", dilated_bytes(dilated_plan(call), heads_of(call), call.rank, True), grows=True)


# ---- scans -----------------------------------------------------------------------------------------------------------
def maps_gathered(call: SizedCall) -> Sending:
    """An all-gather of the maps of segments, and of the last carries; the state has no row of the sequence."""
    return Sending("told", maps_bytes(call) + ends_bytes(call))


def state_gradients_gathered(call: SizedCall) -> Sending:
    """An all-gather of gradients of states, and of the maps again where they were not kept."""
    return Sending("told", gradients_bytes(call) + maps_again_bytes(call))


def first_maps(call: SizedCall) -> int:
    """The maps of all ranks' segments."""
    return maps_bytes(call) * call.ranks


def first_state_gradients(call: SizedCall) -> int:
    """The gradients of states of all ranks' segments, and the states before this rank's steps, which wait with them."""
    return gradients_bytes(call) * call.ranks + states_bytes(call)


def first_kernel_maps(call: SizedCall) -> int:
    """The maps of all ranks' segments."""
    return kernel_maps_bytes(call) * call.ranks


def kernel_maps_gathered(call: SizedCall) -> Sending:
    """Of a recurrence that a kernel computes."""
    return Sending("told", kernel_maps_bytes(call))


def kernel_gradients_gathered(call: SizedCall) -> Sending:
    """An all-gather of gradients of states."""
    return Sending("told", kernel_gradients_bytes(call))


# ---- what is held meanwhile ------------------------------------------------------------------------------------------
def shards_held(call: SizedCall) -> int:
    """The messages of all ranks, and this rank's own where its rows do not lie in order."""
    whole, length, dim = call.result, call["length"], call["dim"]
    parts = whole.bytes // length * layout_of(call["layout"], length, call.ranks).most * call.ranks
    apart = call["outer"] * prod(call["x"].sizes[:dim]) > 1 or length % call.ranks
    return int(parts + (parts // call.ranks if apart else 0))


def smaller_held(call: SizedCall) -> int:
    """Messages: no more than what is given, nor than what is made."""
    return min(int(call["x" if "x" in call.arguments else "grad"].bytes), call.result.bytes)


def first_keys(call: SizedCall) -> int:
    """K and V that come first, on the rank that is sent most: the same on all ranks."""
    return first_rows(exchange_of(call)) * row_bytes(call, call["k"].dtype.itemsize)


def last_sums(call: SizedCall) -> int:
    """The sums of dK and dV that come and go last, in the dtype of the accumulator."""
    return last_rows(exchange_of(call)) * row_bytes(call, accumulator(call["k"].dtype).itemsize)


def first_dilated_keys(call: SizedCall) -> int:
    """Bytes of the first exchange of keys of every term, on the rank with the most."""
    parts = dilated_plan(call).terms
    rows = sum(len(part.term.kv_heads) * first_rows(part.exchange) for part in parts if part.exchange is not None)
    return int(rows * row_bytes(call, call["k"].dtype.itemsize) // call["k"].size(1))


def exchange_of(call: SizedCall) -> Exchange:
    """The plan of a call whose keys are exchanged. Raises AssertionError for head exchanges."""
    plan = ring_plan(call)
    assert isinstance(plan, Exchange), "only exchanges of keys start early"
    return plan


def row_bytes(call: SizedCall, number: int) -> int:
    """Of a row of all KV heads, in numbers of `number` bytes."""
    k, v = call["k"], call["v"]
    return int(k.size(0) * k.size(1) * (k.size(3) + v.size(3)) * number)


@lru_cache(maxsize=256)
def first_rows(plan: Exchange) -> int:
    """Tokens that arrive in the first step of the forward, on the rank with the most of those LOOKED_AT."""
    steps = (plan.forward(rank)[:1] for rank in range(min(plan.ranks, LOOKED_AT)))
    return max((rows_of(step.receives, Cargo.OUT) for first in steps for step in first), default=0)


@lru_cache(maxsize=256)
def last_rows(plan: Exchange) -> int:
    """Tokens whose gradients are exchanged in the last step of the backward, on the rank with the most of those
    LOOKED_AT."""
    steps = (plan.backward(rank)[-1:] for rank in range(min(plan.ranks, LOOKED_AT)))
    return max((rows_of((*step.receives, *step.sends), Cargo.BACK) for last in steps for step in last), default=0)


def rows_of(messages: Iterable[Message], cargo: Cargo) -> int:
    """Tokens in messages with one kind of cargo."""
    return sum(count(message.rows) for message in messages if message.cargo is cargo)
