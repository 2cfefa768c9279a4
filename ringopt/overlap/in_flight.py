"""Bytes that an exchange holds while it is under way and its attention is not: the same on all ranks."""

from __future__ import annotations

import torch.fx as fx

from ringopt.context_parallel.plan.dilated import DilatedPlan
from ringopt.context_parallel.plan.plan_of import Plan
from ringopt.hardware.rates import Rates
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traffic import dilated_plan, ring_plan
from ringopt.ops.traits import traits_of

PART = 64  # of the device's memory: what messages that were started early may hold
UNKNOWN = 1 << 30  # bytes, where the memory of the device is not known


def allowed(rates: Rates) -> int:
    """Bytes that all that is started early may hold at once."""
    return rates.memory // PART or UNKNOWN


def call_at_hand(body: fx.Node, ranks: int) -> SizedCall:
    """Of lengths that may be open, those at hand."""
    return SizedCall.of(body, ranks, 0, number=at_hand)


def plan_at(body: fx.Node, ranks: int) -> Plan:
    """The plan of a ring_attention or its backward."""
    return ring_plan(call_at_hand(body, ranks))


def dilated_plan_at(body: fx.Node, ranks: int) -> DilatedPlan:
    """The plan of a dilated_attention or its backward."""
    return dilated_plan(call_at_hand(body, ranks))


def first_bytes(body: fx.Node, ranks: int) -> int:
    """Of K and V that come first, on the rank that is sent most."""
    traits = traits_of(body)
    return traits.first(call_at_hand(body, ranks)) if traits is not None and traits.first is not None else 0


def home_bytes(body: fx.Node, ranks: int) -> int:
    """Of the sums of dK and dV that come and go last. Those of a dilated attention are waited for in its backward."""
    traits = traits_of(body)
    return traits.last(call_at_hand(body, ranks)) if traits is not None and traits.last is not None else 0
