"""What there is to know of each operator of ringopt, in one table: a row an operator, and no operator without a row.

Reports, plans, diffs, schedules, the memory of a step and the order of messages read it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch.fx as fx

from ringopt.ir.nodes import op_name
from ringopt.ops import conjugates, traffic, work
from ringopt.ops.sized_call import SizedCall
from ringopt.ops.traffic import Sending
from ringopt.torch_compat.schema import OpOverload

NAMESPACE = "ringopt"


@dataclass(frozen=True)
class Traits:
    """One row.

    talks      it names a group of ranks, so what it does depends on the rank
    silent     and yet no rank waits in it for another, in the forward
    sends      what a rank sends; None: nothing, or it is counted with the operator of which this is a half
    holds      bytes that it holds beside its operands and results: messages. Attention's are in cost/memory.py
    flops      that a rank spends; None: no products
    gradient   the call that its backward makes; None: no operator of ringopt
    attention  of which direction it is the body of an attention over the ranks
    recurrence of which direction it is a recurrence over the ranks that may start early
    start      the operator that may stand before it, post its first messages and give it a ticket
    halves     operators that may take its place, of which the first gives the second a ticket
    first      bytes that are under way when it is started early, the same on all ranks
    last       and between its halves
    capturable whether a CUDA graph may hold it: nothing of it is decided, waited for or read on the host
    """

    talks: bool = True
    silent: bool = False
    sends: Callable[[SizedCall], Sending | None] | None = None
    holds: Callable[[SizedCall], int] | None = None
    flops: Callable[[SizedCall], int] | None = None
    gradient: Callable[[SizedCall], SizedCall] | None = None
    attention: Literal["", "forward", "backward"] = ""
    recurrence: Literal["", "forward", "backward"] = ""
    start: str = ""
    halves: tuple[str, str] | None = None
    first: Callable[[SizedCall], int] | None = None
    last: Callable[[SizedCall], int] | None = None
    capturable: bool = False


def alone(**facts: object) -> Traits:
    """Of one device."""
    return Traits(talks=False, silent=True, **facts)  # type: ignore[arg-type]


TABLE: dict[str, Traits] = {
    # ---- attention
    "attention": alone(flops=work.attention, capturable=True),
    "flex": alone(capturable=True),
    "tabulate": alone(capturable=True),
    "mask_facts": alone(),
    "ring_attention": Traits(
        sends=traffic.ring, flops=work.ring, gradient=conjugates.attention_backward, attention="forward",
        start="ring_start", first=traffic.first_keys, last=traffic.last_sums,
    ),
    "ring_attention_backward": Traits(
        sends=traffic.ring_back, flops=work.ring_back, attention="backward", start="ring_start",
        halves=("ring_backward_begin", "ring_backward_finish"), first=traffic.first_keys, last=traffic.last_sums,
    ),
    "ring_start": Traits(),
    "ring_backward_begin": Traits(
        sends=traffic.ring_back, flops=work.ring_back, attention="backward", start="ring_start",
        first=traffic.first_keys, last=traffic.last_sums,
    ),
    "ring_backward_finish": Traits(),
    "dilated_attention": Traits(
        sends=traffic.dilated, flops=work.dilated, gradient=conjugates.attention_backward, attention="forward",
        start="dilated_start", first=traffic.first_dilated_keys,
    ),
    "dilated_attention_backward": Traits(
        sends=traffic.dilated_back, flops=work.dilated_back, attention="backward", start="dilated_start",
        first=traffic.first_dilated_keys,
    ),
    "dilated_start": Traits(),
    # ---- replicated and sharded
    "scatter": Traits(silent=True, gradient=conjugates.gather, capturable=True),
    "gather": Traits(
        sends=traffic.gathered, holds=traffic.shards_held, gradient=conjugates.scatter,
        halves=("gather_start", "gather_finish"),
    ),
    "gather_start": Traits(sends=traffic.gathered),
    "gather_finish": Traits(),
    "reduce_from_group": Traits(sends=traffic.summed, halves=("reduce_start", "reduce_finish")),
    "reduce_bucket": Traits(sends=traffic.bucket, halves=("reduce_start", "reduce_finish")),
    "reduce_start": Traits(sends=traffic.bucket),
    "reduce_finish": Traits(),
    "copy_to_group": Traits(silent=True, gradient=conjugates.reduce_from_group, capturable=True),
    "copy_all_to_group": Traits(silent=True, gradient=conjugates.reduce_bucket, capturable=True),
    "leave_to_wrapper": alone(capturable=True),
    "snapshot": alone(capturable=True),
    "rows_here": Traits(silent=True),  # what it compares is no message of the program
    # ---- rows that change ranks
    "fetch_rows": Traits(sends=traffic.fetched, holds=traffic.smaller_held, gradient=conjugates.return_rows),
    "return_rows": Traits(sends=traffic.returned, holds=traffic.smaller_held),
    "look_up_rows": Traits(sends=traffic.looked_up, holds=traffic.smaller_held, gradient=conjugates.add_to_rows),
    "add_to_rows": Traits(silent=True, holds=traffic.smaller_held),
    "respread": Traits(sends=traffic.respread, holds=traffic.smaller_held, gradient=conjugates.respread),
    "turn": Traits(sends=traffic.turned, holds=traffic.smaller_held, gradient=conjugates.turn),
    "convolve_rows": Traits(
        sends=traffic.windows_fetched, flops=work.windows, gradient=conjugates.convolve_rows_backward
    ),
    "convolve_rows_backward": Traits(sends=traffic.windows_fetched_again, flops=work.windows_back),
    # ---- what is computed over the ranks
    "extreme": Traits(sends=traffic.extremes, gradient=conjugates.count_of_equals),
    "running_sum": Traits(sends=traffic.sums_of_chunks, gradient=conjugates.running_sum),
    "dropout": Traits(silent=True, capturable=True),
    "seeds": alone(capturable=True),
    "agreed_seeds": Traits(sends=traffic.seeds_compared),
    "draw": alone(capturable=True),
    "drawn": alone(capturable=True),
    "custom_gradient": alone(capturable=True),
    "picked": alone(flops=work.picked, gradient=conjugates.picked_backward),
    "picked_backward": alone(flops=work.picked_back),
    # ---- scans
    "scan": alone(flops=work.steps, gradient=conjugates.scan_backward, capturable=True),
    "scan_backward": alone(flops=work.steps_back, capturable=True),
    "sharded_scan": Traits(
        sends=traffic.maps_gathered, flops=work.segments, gradient=conjugates.sharded_scan_backward,
        recurrence="forward", start="scan_start", first=traffic.first_maps,
    ),
    "sharded_scan_backward": Traits(
        sends=traffic.state_gradients_gathered, flops=work.segments_back, recurrence="backward",
        start="scan_backward_start", first=traffic.first_state_gradients,
    ),
    "scan_start": Traits(),
    "scan_backward_start": Traits(),
    "sharded_kernel_scan": Traits(
        sends=traffic.kernel_maps_gathered, gradient=conjugates.sharded_kernel_scan_backward,
        recurrence="forward", start="kernel_scan_start", first=traffic.first_kernel_maps,
    ),
    "kernel_scan_start": Traits(),
    "sharded_kernel_scan_backward": Traits(sends=traffic.kernel_gradients_gathered),
}  # fmt: skip

LAST_HALVES = {row.halves[1] for row in TABLE.values() if row.halves and row.attention}


def traits_of(node: fx.Node) -> Traits | None:
    """None of what is no operator of ringopt."""
    ours = isinstance(node.target, OpOverload) and node.target.namespace == NAMESPACE
    return TABLE[op_name(node)] if ours else None


# ---- which messages --------------------------------------------------------------------------------------------------
def talks(node: fx.Node) -> bool:
    """Whether it is an operator of ours that names a group of ranks."""
    traits = traits_of(node)
    return traits is not None and traits.talks


def sends(node: fx.Node) -> bool:
    """Whether the ranks exchange messages when the node runs, or wait for those of another."""
    traits = traits_of(node)
    return traits is not None and not traits.silent


def attends(node: fx.Node) -> str:
    """Whether it is the body of an attention over the ranks, "forward" or "backward"; else ""."""
    traits = traits_of(node)
    return traits.attention if traits is not None else ""


def is_recurrence(node: fx.Node) -> bool:
    """Whether it is a recurrence over the ranks that may start early."""
    traits = traits_of(node)
    return traits is not None and bool(traits.recurrence)


def direction_of(node: fx.Node) -> str:
    """Of what may start early, an attention or a recurrence over the ranks: "forward" or "backward"; else ""."""
    traits = traits_of(node)
    return (traits.attention or traits.recurrence) if traits is not None else ""


def exchanges(node: fx.Node) -> bool:
    """Whether it is a body of such, or the second half of one."""
    return bool(direction_of(node)) or (traits_of(node) is not None and op_name(node) in LAST_HALVES)


def is_halved(node: fx.Node) -> bool:
    """Whether it is a gather or a sum, of which halves may take the place."""
    traits = traits_of(node)
    return traits is not None and traits.halves is not None and not traits.attention


def gradient_name(node: fx.Node) -> str:
    """The operator of ringopt that its backward calls, or ""."""
    traits = traits_of(node)
    return traits.gradient(SizedCall.of(node, 0, 0)).name if traits is not None and traits.gradient is not None else ""


def starts_back(node: fx.Node) -> bool:
    """Whether the exchange of its backward can start before that."""
    return bool(TABLE[gradient_name(node)].start)


# Operators that post the first messages of an attention or a recurrence, and all that give a ticket.
FIRST = frozenset(row.start for row in TABLE.values() if row.start)
STARTS = frozenset((*FIRST, *(row.halves[0] for row in TABLE.values() if row.halves)))


def is_start(node: fx.Node) -> bool:
    """Whether what it posts is waited for by another operator."""
    return traits_of(node) is not None and op_name(node) in STARTS


def starts_exchange(node: fx.Node) -> bool:
    """Whether a node starts that of an attention or a recurrence."""
    return traits_of(node) is not None and op_name(node) in FIRST


# ---- how much --------------------------------------------------------------------------------------------------------
def sending_of(call: SizedCall) -> Sending | None:
    """What a call sends, from the row of its operator; None where it sends nothing."""
    sends = TABLE[call.name].sends
    return sends(call) if sends is not None else None


def sent_bytes(call: SizedCall) -> int:
    """By the rank that makes the call."""
    sending = sending_of(call)
    return sending.at(call.ranks) if sending is not None else 0


def gradient_bytes(call: SizedCall) -> int:
    """That the backward of the call sends."""
    gradient = TABLE[call.name].gradient
    return sent_bytes(gradient(call)) if gradient is not None else 0


def held_bytes(node: fx.Node, ranks: int) -> int:
    """That an operator holds beside its operands and results, at sizes that are numbers."""
    traits = traits_of(node)
    return traits.holds(SizedCall.of(node, ranks, 0)) if traits is not None and traits.holds is not None else 0


def flops_of(node: fx.Node, call: SizedCall) -> int:
    """Of any operator, on this rank."""
    traits = traits_of(node)
    if traits is not None:
        return traits.flops(call) if traits.flops is not None else 0
    if op_name(node) == "scaled_dot_product_attention":
        return work.sdpa(call)
    return work.product(node, call)


# ---- completeness ----------------------------------------------------------------------------------------------------
def check_rows(defined: Iterable[str]) -> None:
    """Raises TypeError for an operator without a row, and for a row without an operator. `defined`: the names that the
    dispatcher knows, `ringopt::gather` or `ringopt::gather.overload`."""
    parts = (name.split("::") for name in defined if name.startswith(f"{NAMESPACE}::"))
    names = {name.partition(".")[0] for _namespace, name in parts}
    if names != TABLE.keys():
        without, beyond = sorted(names - TABLE.keys()), sorted(TABLE.keys() - names)
        raise TypeError(
            f"operators of {NAMESPACE} without a row in ringopt/ops/traits.py: {without}; rows without an operator: "
            f"{beyond}. Say there what each one sends, holds and computes"
        )
