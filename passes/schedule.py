"""Which attentions start their exchange early, and behind what.

    y = ring_attention(q, k, v, ...)   ->   y = ring_attention(q, k, v, ..., early="forward backward home")

"forward": something that takes time stands between K and V and the attention, and needs neither: the projection of the
queries, a branch beside it. "backward": something stands between this attention and the next, whose gradients are
computed while this one's keys and values travel again. "home": what stood before the attention and needed neither has
gradients, which are computed while the last sums of dK and dV come home. Where nothing does, or less than it costs to
start apart (a step, by the rates that all ranks agreed on), or where more would be under way than may be (a part of the
device's memory), the exchange starts with the attention, whose own first step hides it, and ends with its backward. The
graphs themselves are ordered when autograd has made them (ringopt/overlap/start_early.py); what that needs of the rates
is noted in the context.

Before: a lowered graph. After: each attention says in which directions it starts early, and its site in the report
says behind what, or why not; a note of the report has the gathers and sums that are held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch.fx as fx

from ringopt.context_parallel.plan.exchange import Exchange
from ringopt.cost.choose import duration
from ringopt.distributed.mesh import ANY
from ringopt.hardware.rates import Rates
from ringopt.ir.nodes import is_parameter, module_path, named, op_name, requires_grad
from ringopt.overlap.async_collectives import Budget, advance_all, bytes_of, collectives_of
from ringopt.overlap.in_flight import allowed, dilated_plan_at, first_bytes, home_bytes, plan_at
from ringopt.overlap.reorder import flops_of, is_product
from ringopt.overlap.start_early import EXCHANGES, beside_of, gap_before
from ringopt.passes.choose_strategy import rates_for
from ringopt.pipeline import Context, Pass
from ringopt.report import readable

SITES = ("ring_attention", "dilated_attention")
TOLD = 3  # names in a sentence
CONJUGATES = {"scatter": "gather", "copy_to_group": "sum"}  # what the gradient of a conversion waits for


class Schedule(Pass):
    name = "schedule"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        by_name = {node.name: info for node, info in context.sites.items()}
        for node in list(gm.graph.nodes):
            if op_name(node) not in SITES:
                continue
            why, rates = why_not(node, context), rates_for(context, node)
            ranks = context.mesh.size
            context.budget = Budget(ranks, allowed(rates), rates.default.rate, rates.step)
            first = first_bytes(node, ranks) if not why else 0
            # The gradients of a product are two more of its size.
            ahead = Meanwhile.of([*gap_before(node).products, *beside(node)], 1, ranks, rates, first)
            behind = Meanwhile.of(products_after(node, context), 2, ranks, rates, first)
            aside = Meanwhile.of(products_aside(node), 2, ranks, rates, home_bytes(node, ranks) if not why else 0)
            work = {"forward": ahead, "backward": behind, "home": aside}
            ways = [way for way in work if work[way].pays and work[way].fits and not why]
            if ways:
                node.kwargs = {**node.kwargs, "early": " ".join(ways)}
            info = by_name.get(node.name.removesuffix(f"_{op_name(node)}"))
            if info is not None:
                info.notes.append(told(ahead, behind, aside, why))
        context.notes += waiting(gm, context)


def waiting(gm: fx.GraphModule, context: Context) -> Iterator[str]:
    """What of the forward's gathers and sums the bound on what is under way will hold back when they are ordered: tried
    on a copy, for compiled code that is cached is not ordered anew."""
    budget = context.budget
    if budget is None or unordered(context):
        return
    copy, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.graph_copy(gm.graph, twins)
    early = [node for node in gm.graph.nodes if op_name(node) in SITES and "forward" in named(node, "early").split()]
    held = {twins[node]: float(first_bytes(node, context.mesh.size)) for node in early}
    found = advance_all(collectives_of(copy), held, budget.in_flight)
    if found:
        names = [f"{op_name(one.node)} of {one.node.all_input_nodes[0].name} ({readable(one.size)})" for one in found]
        more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
        yield (
            f"held back: {', '.join(names[:TOLD])}{more}, for up to {readable(max(one.under_way for one in found))} "
            f"would be under way, and at most {readable(budget.in_flight)} may be"
        )
    if large := too_large(gm.graph, budget.in_flight):
        more = f" and {len(large) - TOLD} more" if len(large) > TOLD else ""
        yield (
            f"held back in the backward: {', '.join(large[:TOLD])}{more}, for at most {readable(budget.in_flight)} may "
            "be under way; others may be too"
        )


def too_large(graph: fx.Graph, bound: int) -> list[str]:
    """Gathers and sums of gradients that go past no other message, whatever the graph of the backward, which does not
    exist yet. Those of parameters take the place of what they sum."""
    found, carries = [], requires_grad(graph)
    for node in graph.nodes:
        what = CONJUGATES.get(op_name(node), "")
        if not what or not carries[x := node.all_input_nodes[0]] or is_parameter(x):
            continue
        if bound < (size := bytes_of(x)) < inf:
            found.append(f"{what} of the gradient of {x.name} ({readable(size)})")
    return found


def unordered(context: Context) -> str:
    """Why nothing of a graph changes its place, or ""."""
    if context.mesh.name == ANY:
        return "a program for any number of ranks runs in the order in which it is written"
    if context.options.inner_backend == "eager":
        return "inner_backend='eager' has no graphs behind autograd to be ordered"
    return ""


def why_not(node: fx.Node, context: Context) -> str:
    """Why the exchange of an attention cannot start before it, or ""."""
    if why := unordered(context):
        return why
    if op_name(node) == "dilated_attention":
        sends = dilated_plan_at(node, context.mesh.size).strategies != "local"
        return "" if sends else "it sends nothing"
    plan = plan_at(node, context.mesh.size)
    if not isinstance(plan, Exchange) or plan.queries_move:
        return f"strategy {named(node, 'strategy')} sends queries too"
    return "" if plan.length else "it sends nothing"


def beside(node: fx.Node) -> list[fx.Node]:
    """The products behind it that do not need it, and can be computed before it."""
    return [other for other in beside_of(node) if is_product(other)]


def products_aside(node: fx.Node) -> list[fx.Node]:
    """Of what stands before it, those whose gradients need no dK and dV; of a dilated attention these come home with
    it."""
    return gap_before(node).products if op_name(node) == "ring_attention" else []


def products_after(node: fx.Node, context: Context) -> Iterator[fx.Node]:
    """Up to the next exchange, those that pass a gradient on."""
    after = False
    for other in node.graph.nodes:
        if other is node:
            after = True
        elif after and op_name(other) in EXCHANGES:
            return
        elif after and is_product(other) and context.carries.get(other, True):
            yield other


@dataclass(frozen=True)
class Meanwhile:
    """What is computed while messages travel: its products, the seconds that they take, and those that it costs to
    start apart; the bytes that are under way meanwhile, and how many may be."""

    products: Sequence[fx.Node]
    seconds: float
    cost: float
    held: int
    bound: int

    @classmethod
    def of(cls, products: Iterable[fx.Node], times: int, ranks: int, rates: Rates, held: int) -> Meanwhile:
        found = list(products)
        flops = times * sum(flops_of(node, ranks) for node in found)
        return cls(found, flops / rates.default.rate, rates.step, held, allowed(rates))

    @property
    def pays(self) -> bool:
        return bool(self.products) and self.seconds >= self.cost

    @property
    def fits(self) -> bool:
        return self.held <= self.bound

    @property
    def brief(self) -> str:
        """Why nothing is moved behind it, where there is something."""
        if self.pays:
            return f"{readable(self.held)} would be under way behind {self}, and at most {readable(self.bound)} may be"
        return f"{self} is less than the {duration(self.cost)} that it costs to start apart"

    def __str__(self) -> str:
        names = dict.fromkeys((module_path(node) or op_name(node)).rsplit(".", 1)[-1] for node in self.products)
        more = f" and {len(names) - TOLD} more" if len(names) > TOLD else ""
        return f"{', '.join(list(names)[:TOLD])}{more} ({duration(self.seconds)})"


def told(ahead: Meanwhile, behind: Meanwhile, aside: Meanwhile, why: str) -> str:
    if why:
        return f"its exchange starts with it: {why}"
    first, then, home = f"behind {ahead}", f"behind the gradients of {behind}", ""
    if not (ahead.pays and ahead.fits):
        first = "with it, for " + (ahead.brief if ahead.products else "nothing stands between that needs no K and V")
    if not (behind.pays and behind.fits):
        then = "with it, for " + (behind.brief if behind.products else "it is the last")
    if aside.pays:
        home = f", and ends behind those of {aside}" if aside.fits else f", and ends with it, for {aside.brief}"
    return f"its exchange starts {first}; in the backward {then}{home}"
