"""Bytes of the buffers of an exchange in flight before its attention runs: the same on all ranks."""

from __future__ import annotations

import torch.fx as fx

from ringopt.context_parallel.plan.dilated import DilatedPlan
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.hardware.rates import Rates
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traffic import dilated_plan, ring_plan
from ringopt.ops.traits import TABLE, traits_of

PART = 64  # one part of so many of the device's memory is for messages that were started early
UNKNOWN = 1 << 30  # bytes, where the memory of the device is not known


def allowed(rates: Rates) -> int:
    """Bytes in flight at most, of all messages that were started early."""
    return rates.memory // PART or UNKNOWN


def call_at_hand(body: fx.Node, ranks: int) -> SizedCall:
    """The call of a node with the hints of symbolic lengths."""
    return SizedCall.of(body, ranks, 0, number=at_hand)


def plan_at(body: fx.Node, ranks: int) -> Plan:
    """The plan of a ring_attention or its backward."""
    return ring_plan(call_at_hand(body, ranks))


def dilated_plan_at(body: fx.Node, ranks: int) -> DilatedPlan:
    """The plan of a dilated_attention or its backward."""
    return dilated_plan(call_at_hand(body, ranks))


def first_bytes(body: fx.Node, ranks: int) -> int:
    """Bytes of the first K and V that arrive, on the rank that receives most."""
    traits = traits_of(body)
    return traits.first(call_at_hand(body, ranks)) if traits is not None and traits.first is not None else 0


def first_bytes_back(body: fx.Node, ranks: int) -> int:
    """Bytes under way where the exchange of its backward is started early, of a body in the forward: for a recurrence
    the states before its steps wait too."""
    traits = traits_of(body)
    if traits is None or not traits.recurrence or traits.gradient is None:
        return first_bytes(body, ranks)
    back = traits.gradient(call_at_hand(body, ranks))
    first = TABLE[back.name].first
    return first(back) if first is not None else 0


def home_bytes(body: fx.Node, ranks: int) -> int:
    """Bytes of the last sums of dK and dV, received and sent; 0 for dilated attention, whose backward waits for
    them."""
    traits = traits_of(body)
    return traits.last(call_at_hand(body, ranks)) if traits is not None and traits.last is not None else 0
