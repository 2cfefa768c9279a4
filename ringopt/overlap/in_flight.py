"""Bytes that an exchange holds while it is under way and its attention is not: the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch.fx as fx

from ringopt.calls import DilatedCall, RingCall
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.plan.dilated import DilatedPlan, dilated_plan_of
from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Message
from ringopt.context_parallel.plan.plan_of import Plan, plan_of
from ringopt.hardware.rates import Rates
from ringopt.ir.nodes import named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.kernels.base import accumulator

PART = 64  # of the device's memory: what messages that were started early may hold
UNKNOWN = 1 << 30  # bytes, where the memory of the device is not known
LOOKED_AT = 8  # ranks at most; of more, the others are like these


def allowed(rates: Rates) -> int:
    """Bytes that all that is started early may hold at once."""
    return rates.memory // PART or UNKNOWN


def plan_at(body: fx.Node, ranks: int) -> Plan:
    """The plan of a ring_attention or its backward, at the length at hand."""
    call = RingCall.of(body)
    lengths = (length_of(call.q_length), length_of(call.kv_length))
    where = (call.pattern, *lengths, ranks, call.q_layout, call.kv_layout)
    return plan_of(*where, call.strategy, call.heads, call.mask_term)


def length_of(size: Any) -> int:
    """Of a length that may be open, that at hand."""
    return at_hand(value_of(size) if isinstance(size, fx.Node) else size)


def dilated_plan_at(body: fx.Node, ranks: int) -> DilatedPlan:
    """The plan of a dilated_attention or its backward, at the length at hand."""
    call = DilatedCall.of(body)
    return dilated_plan_of(call.pattern, length_of(call.length), *call.heads, ranks, call.layout, call.strategy)


def first_bytes(body: fx.Node, ranks: int) -> int:
    """Of K and V that come first, on the rank that is sent most."""
    number = value_of(named(body, "k")).element_size()
    if op_name(body).startswith("dilated"):
        parts = dilated_plan_at(body, ranks).terms
        rows = sum(len(part.term.kv_heads) * first_rows(part.exchange) for part in parts if part.exchange is not None)
        return rows * row_of(body, number) // shape_of(named(body, "k"))[1]
    rows = first_rows(exchange_at(body, ranks))
    return rows * row_of(body, number)


def home_bytes(body: fx.Node, ranks: int) -> int:
    """Of the sums of dK and dV that come and go last, in the dtype of the accumulator. Those of a dilated attention are
    waited for in its backward."""
    if op_name(body).startswith("dilated"):
        return 0
    rows = last_rows(exchange_at(body, ranks))
    return rows * row_of(body, accumulator(value_of(named(body, "k")).dtype).itemsize)


def exchange_at(body: fx.Node, ranks: int) -> Exchange:
    plan = plan_at(body, ranks)
    assert isinstance(plan, Exchange), "only exchanges of keys start early"
    return plan


@lru_cache(maxsize=256)
def first_rows(plan: Exchange) -> int:
    steps = (plan.forward(rank)[:1] for rank in range(min(plan.ranks, LOOKED_AT)))
    return max((rows_of(step.receives, Cargo.OUT) for first in steps for step in first), default=0)


@lru_cache(maxsize=256)
def last_rows(plan: Exchange) -> int:
    steps = (plan.backward(rank)[-1:] for rank in range(min(plan.ranks, LOOKED_AT)))
    return max((rows_of((*step.receives, *step.sends), Cargo.BACK) for last in steps for step in last), default=0)


def rows_of(messages: Iterable[Message], cargo: Cargo) -> int:
    return sum(count(message.rows) for message in messages if message.cargo is cargo)


def row_of(body: fx.Node, number: int) -> int:
    """Bytes of a row of all KV heads, in numbers of `number` bytes."""
    k, v = (value_of(named(body, name)) for name in ("k", "v"))
    batch, heads, width = map(at_hand, (k.shape[0], k.shape[1], k.shape[3] + v.shape[3]))
    return batch * heads * width * number
