"""Which attentions and recurrences start their exchange early, and behind what.

    y = ring_attention(q, k, v, ...)   ->   y = ring_attention(q, k, v, ..., early="forward backward home")
    S, y = sharded_scan(S0, xs, ...)   ->   S, y = sharded_scan(S0, xs, ..., early="forward backward")

"forward": something that takes time stands between K and V and the attention, and needs neither: the projection of the
queries, a branch beside it. "backward": something stands between this attention and the next, whose gradients are
computed while this one's keys and values travel again. "home": what stood before the attention and needed neither has
gradients, which are computed while the last sums of dK and dV come home. Where nothing does, or less than it costs to
start apart (a step, by the rates that all ranks agreed on), or where more would be under way than may be (a part of the
device's memory), the exchange starts with the attention, whose own first step hides it, and ends with its backward. The
graphs themselves are ordered when autograd has made them (ringopt/overlap/start_early.py); what that needs of the rates
is noted in the context. Where the cost model chose for an attention by itself, it may become an all-gather here
(ringopt/overlap/all_at_once.py). The first messages of a recurrence need all its operands, and what is computed
meanwhile is what stands beside it: products within a chunk, a gate of its output. What masks read starts on its way to
the host (ringopt/overlap/mask_copies.py).

Before: a lowered graph. After: each attention and recurrence says in which directions it starts early, and its site in
the report says behind what, or why not; a note of the report has the gathers and sums that are held back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from ringopt.calls import DilatedCall, OpCall, call_over_ranks
from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.cost.site import rates_at
from ringopt.dims.products import is_product
from ringopt.distributed.mesh import ANY, Mesh
from ringopt.hardware.rates import Rates
from ringopt.ir.nodes import op_name, value_of
from ringopt.ir.symbolic_sizes import is_open
from ringopt.ops.traits import attends, direction_of, exchanges, is_recurrence, starts_back
from ringopt.options import InnerBackend
from ringopt.overlap.all_at_once import all_at_once
from ringopt.overlap.async_collectives import Budget
from ringopt.overlap.held_back import held_back
from ringopt.overlap.in_flight import allowed, dilated_plan_at, first_bytes, first_bytes_back, home_bytes, plan_at
from ringopt.overlap.mask_copies import share_copies
from ringopt.overlap.meanwhile import Meanwhile, note
from ringopt.overlap.start_early import gap_before, independent_behind
from ringopt.pipeline import Context, Pass
from ringopt.scans.not_affine import runs_in_turn


@dataclass(frozen=True)
class Schedule(Pass):
    """Decides which exchanges start early, in the forward, the backward, or for the gradients of K and V, because there
    is work to hide them behind."""

    name = "schedule"
    reads = ("mesh", "carries")
    writes = ("sites", "scans", "notes", "budget")
    optional = True
    lost = "every exchange starts with its attention or recurrence, behind nothing but its own first block"

    inner_backend: InnerBackend = "inductor"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        unordered = why_unordered(context.mesh, self.inner_backend)
        if context.mesh.name != ANY:
            share_copies(gm.graph)
        by_name = {node.name: info for node, info in (*context.sites.items(), *context.scans.items())}
        bodies = [node for node in gm.graph.nodes if direction_of(node)]
        for node in bodies:
            rates, ranks = rates_at(context.mesh, value_of(node.all_input_nodes[0])), context.mesh.size
            context.budget = Budget(ranks, allowed(rates), rates.default.rate, rates.step)
            info = by_name.get(node.name.removesuffix("_states" if is_recurrence(node) else f"_{op_name(node)}"))
            if not unordered and info is not None and attends(node):
                all_at_once(node, info, context.mesh, rates, self.work(node, ranks, rates, context, "not yet"))
            why = unordered or why_not(node, ranks)
            work = self.work(node, ranks, rates, context, why)
            ways = [way for way in work if work[way].pays and work[way].fits and not why]
            if ways:
                OpCall.of(node).replace(early=" ".join(ways)).write(node)
            if info is not None:
                info.notes.append(note(node, work["forward"], work["backward"], work["home"], why))
        if context.budget is not None and not unordered:
            early = [node for node in bodies if "forward" in OpCall.of(node)["early"].split()]
            context.notes += held_back(gm.graph, context.budget, early, context.mesh.size)

    @staticmethod
    def work(node: fx.Node, ranks: int, rates: Rates, context: Context, why: str) -> dict[str, Meanwhile]:
        """What overlaps with each end of the exchange; bytes of none, where `why` says why."""
        ends = first_bytes, first_bytes_back, home_bytes
        first, back, last = (held(node, ranks) if not why else 0 for held in ends)
        # The gradients of a product are two more of its size.
        return {
            "forward": Meanwhile.of([*gap_before(node).products, *products_behind(node)], 1, ranks, rates, first),
            "backward": Meanwhile.of(products_after(node, context), 2, ranks, rates, back),
            "home": Meanwhile.of(products_aside(node), 2, ranks, rates, last),
        }


def why_unordered(mesh: Mesh, inner_backend: InnerBackend) -> str:
    """Why nothing of a graph changes its place, or ""."""
    if mesh.name == ANY:
        return "a program for any number of ranks runs in the order in which it is written"
    if inner_backend == "eager":
        return "inner_backend='eager' has no graphs behind autograd to be ordered"
    return ""


def why_not(node: fx.Node, ranks: int) -> str:
    """Why the exchange of an attention or a recurrence cannot start before it, or ""."""
    if is_recurrence(node):
        return "the ranks run one after the other" if runs_in_turn(node) else ""
    call = call_over_ranks(node)
    if is_open(call.heads[0]):  # which the start is told as a number
        return "its number of heads changes with the length"
    if isinstance(call, DilatedCall):
        sends = dilated_plan_at(node, ranks).strategies != "local"
        return "" if sends else "it sends nothing"
    plan = plan_at(node, ranks)
    if not isinstance(plan, Exchange) or plan.queries_move:
        return f"strategy {call.strategy} sends queries too"
    return "" if plan.length else "it sends nothing"


def products_behind(node: fx.Node) -> list[fx.Node]:
    """The products behind it that do not need it, and can be computed before it."""
    return [other for other in independent_behind(node) if is_product(other)]


def products_aside(node: fx.Node) -> list[fx.Node]:
    """Of what stands before it, those whose gradients need no dK and dV; of a dilated attention these come home with
    it."""
    return gap_before(node).products if op_name(node) == "ring_attention" else []


def products_after(node: fx.Node, context: Context) -> Iterator[fx.Node]:
    """Up to the next exchange, those that pass a gradient on."""
    if not starts_back(node):
        return
    after = False
    for other in node.graph.nodes:
        if other is node:
            after = True
        elif after and exchanges(other):
            return
        elif after and is_product(other) and context.carries.get(other, True):
            yield other
