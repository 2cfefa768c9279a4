"""Exchanges started early, in the graphs that AOTAutograd makes: forward and backward, each separately.

    q = mm(x, wq)                             k, v = ...
    k, v = ...                                ticket = ring_start(k, v, ...)
    y = ring_attention(q, k, v, ...)    ->    q = mm(x, wq)
                                              y = ring_attention(q, k, v, ..., ticket)

The first messages of an attention carry keys and values (in the backward, saved ones), and overlap with all computation
that needs neither: the projection of the queries, a parallel branch, in the backward the gradients of the layers
behind. This is list scheduling with one link: the dependencies of K and V go first, then the start, then the rest. The
next exchange starts when the one before it is done, so at most one is in flight, and none holds more memory than it
would have held without.

A recurrence over ranks starts so too (ops/scan_start.py): its first messages are made of all its operands, and overlap
with what needs neither these nor its results.

Whether an attention or a recurrence is started early is one of its arguments (passes/schedule.py decides, by facts that
all ranks share). In the backward it may also finish late: the last sums of dK and dV return to their rank during
computation that needs neither (`finish_late`), the gradient of that projection first of all. All-gathers and all-
reduces start early too (ringopt/overlap/async_collectives.py).

Where an exchange starts is decided here, by operators that send and by nothing else, for a partitioner may recompute
other nodes on one rank than on another: all ranks post their messages in one order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx

from ringopt.calls import OpCall, call_over_ranks
from ringopt.dims.products import is_product
from ringopt.ir.nodes import op_name, origin, shape_of, value_of
from ringopt.ops import operators
from ringopt.ops.traits import TABLE, attends, direction_of, exchanges, is_start, starts_exchange, talks
from ringopt.overlap.async_collectives import Budget, collect_early
from ringopt.overlap.collective_order import Lockstep, Split
from ringopt.overlap.in_flight import first_bytes
from ringopt.overlap.reorder import dependents_among, is_fixed, sources_among
from ringopt.overlap.row_major import say_row_major
from ringopt.torch_compat import dynamo, inductor
from ringopt.torch_compat.inductor_passes import OrderedSet, with_last


@dataclass(frozen=True)
class Gap:
    """The nodes before an attention or a recurrence that can be reordered: those that its first messages depend on (K
    and V, or all operands), and the others."""

    needed: Sequence[fx.Node]
    free: Sequence[fx.Node]

    @property
    def products(self) -> list[fx.Node]:
        return [node for node in self.free if is_product(node)]


def gap_before(body: fx.Node) -> Gap:
    """The gap from the exchange before `body` on, or from the last fixed node that its first messages depend on:
    communication, random numbers, writes."""
    between: list[fx.Node] = []
    node = body.prev
    while node.op != "root" and not exchanges(node):
        if node.op != "placeholder":
            between.append(node)
        node = node.prev
    between.reverse()
    needed = sources_among(between, taken_by_start(body))
    last = max((place for place, node in enumerate(between) if node in needed and is_fixed(node)), default=-1)
    rest = between[last + 1 :]
    return Gap([node for node in rest if node in needed], [node for node in rest if node not in needed])


def taken_by_start(body: fx.Node) -> list[fx.Node]:
    """What the operator that starts the exchange of `body` is given."""
    if not attends(body):
        return list(body.all_input_nodes)
    call = call_over_ranks(body)
    return [x for x in (call.k, call.v, *call.lengths) if isinstance(x, fx.Node)]


# ---- the graphs ------------------------------------------------------------------------------------------------------
def order(graph: fx.Graph, budget: Budget) -> None:
    """Reorders, in place: messages start as early and are waited for as late as they can be. What no passes have seen
    stays: a backward of theirs that compiled autograd has traced is in order."""
    if not budget.ranks:
        return
    finish_late(graph)
    start_early(graph)
    bodies = [finish_of(node) for node in graph.nodes if starts_exchange(node)]
    collect_early(graph, budget, {body: first_bytes(body, budget.ranks) for body in bodies})


def start_early(graph: fx.Graph) -> None:
    """Inserts the start of each attention and recurrence whose arguments ask for it, in place. In the forward, nodes
    behind it that do not depend on it are computed before it as well."""
    bodies = [node for node in graph.nodes if direction_of(node)]
    for number, body in enumerate(bodies):
        if (way := direction_of(body)) in OpCall.of(body)["early"].split():
            behind = independent_behind(body) if way == "forward" else []
            if any(map(is_product, behind)):
                for node in behind:
                    body.prepend(node)
            _start(body, gap_before(body), number)


def independent_behind(body: fx.Node) -> list[fx.Node]:
    """The nodes after an attention or a recurrence that do not depend on it, up to the next fixed node."""
    nodes = list(body.graph.nodes)
    after = list(takewhile(_movable, nodes[nodes.index(body) + 1 :]))
    needing = set(dependents_among([body, *after], [body]))
    return [node for node in after if node not in needing]


def _movable(node: fx.Node) -> bool:
    return not is_fixed(node) and node.op != "output"


def _start(body: fx.Node, gap: Gap, number: int) -> None:
    first = gap.free[0] if gap.free else body
    for node in gap.needed:
        first.prepend(node)
    call, begin = OpCall.of(body), getattr(operators, TABLE[op_name(body)].start).default
    asked: dict[str, Any] = {"number": number}
    if way := attends(body):
        asked |= {"q_heads": shape_of(call["q"])[1], "backward": way == "backward"}
    with body.graph.inserting_before(first):
        ticket = call.of_half(begin, **asked).insert(body.graph)
    like = next(value_of(x) for x in body.all_input_nodes if isinstance(value_of(x), torch.Tensor))
    ticket.meta = {**origin(body), "val": like.new_empty((), dtype=torch.int64, device="cpu")}
    call.replace(ticket=ticket).write(body)
    if "eager_input_vals" in body.meta:  # where Inductor reads how the operands lie in memory
        values, keywords = body.meta["eager_input_vals"]
        place = list(call.arguments).index("ticket")
        body.meta["eager_input_vals"] = ((*values[:place], value_of(ticket), *values[place + 1 :]), keywords)


def finish_late(graph: fx.Graph) -> None:
    """Splits each backward whose arguments ask for it, in place: nodes that do not depend on dK and dV, up to the next
    fixed node, go before those that do, and the finish between the two. Also where there are few of them on this rank,
    since a partitioner chose so: other ranks finish there, and the order of messages must be one."""
    for body in graph.find_nodes(op="call_function", target=operators.ring_attention_backward.default):
        parts = {user.args[1]: user for user in body.users}
        grads = [parts[i] for i in (1, 2) if i in parts]
        if "home" not in call_over_ranks(body).early.split() or not grads:
            continue
        nodes = list(graph.nodes)
        after = list(takewhile(_movable, nodes[nodes.index(body) + 1 :]))
        late = dependents_among(after, grads)
        free = [node for node in after if node not in late]
        for node in free:
            late[0].prepend(node)
        part_home(body, parts, late[0])


def part_home(body: fx.Node, parts: dict[Any, fx.Node], place: fx.Node) -> None:
    """Splits `body` into a start and a finish before `place`. `parts`: its results, by index."""
    graph, call, (dq, dk, dv, dsources) = body.graph, OpCall.of(body), value_of(body)
    ticket_value = dk.new_empty((), dtype=torch.int64, device="cpu")
    with graph.inserting_before(body):
        begin = call.of_half(operators.ring_backward_begin.default).insert(graph)
        results = [graph.call_function(operator.getitem, (begin, number)) for number in range(3)]
    begin.meta = {**body.meta, "val": (dq, ticket_value, dsources)}
    for node, value in zip(results, (dq, ticket_value, dsources), strict=True):
        node.meta = {**origin(body), "val": value}
    with graph.inserting_before(place):
        finish = call.of_half(operators.ring_backward_finish.default, ticket=results[1]).insert(graph)
        home = [graph.call_function(operator.getitem, (finish, number)) for number in range(2)]
    finish.meta = {**origin(body), "val": (dk, dv)}
    for node, value in zip(home, (dk, dv), strict=True):
        node.meta = {**origin(body), "val": value}
    for number, node in enumerate((results[0], *home, results[2])):
        if number in parts:
            parts[number].replace_all_uses_with(node)
            graph.erase_node(parts[number])
    graph.erase_node(body)
    for node in (*results, *home):
        if not node.users:
            graph.erase_node(node)


# ---- the compilers ---------------------------------------------------------------------------------------------------
class InOrder(Lockstep):
    """Starts early, and makes Inductor keep the order: the overlapped computation depends on the start, and the
    attention on the overlapped computation."""

    def __init__(self, budget: Budget):
        self.budget = budget

    def __call__(self, graph: fx.Graph) -> None:
        say_row_major(graph)
        order(graph, self.budget)
        super().__call__(graph)

    def ties(self, graph: fx.Graph) -> dict[fx.Node, OrderedSet[fx.Node]]:
        found = super().ties(graph)
        for ticket in filter(is_start, graph.nodes):
            finish = finish_of(ticket)
            meanwhile = products_between(ticket, finish)
            # Collectives are in flight for long: tying the first node (and the last) is enough.
            long = op_name(ticket) in ("reduce_start", "gather_start")
            for node in meanwhile[:1] if long else meanwhile:
                found.setdefault(node, OrderedSet()).add(ticket)
            for node in meanwhile[-1:] if long else meanwhile:
                found.setdefault(finish, OrderedSet()).add(node)
        places = {node: place for place, node in enumerate(graph.nodes)}
        return dict(sorted(found.items(), key=lambda tie: places[tie[0]]))

    def uuid(self) -> str:
        return f"{super().uuid()}, early 7, {self.budget}"


def finish_of(start: fx.Node) -> fx.Node:
    """The operator that takes the ticket of `start`."""
    ticket = start
    if op_name(start) == "ring_backward_begin":
        ticket = next(part for part in start.users if part.args[1] == 1)
    (finish,) = ticket.users
    return finish


def products_between(ticket: fx.Node, finish: fx.Node) -> list[fx.Node]:
    """Matrix products and attention between the start of an exchange and its finish."""
    nodes = list(ticket.graph.nodes)
    return [node for node in nodes[nodes.index(ticket) : nodes.index(finish)] if is_product(node)]


def inductor_settings(gm: fx.GraphModule, budget: Budget) -> dict[str, Any]:
    """Settings for compile_fx, which also hold for the backward, however late that is compiled; none for a graph
    without communication. Inductor's reordering for peak memory is off: it depends on sizes, which differ by rank."""
    if not any(map(talks, gm.graph.nodes)):
        return {}
    return {
        "custom_partitioner_fn": Split(inductor.setting("custom_partitioner_fn")),
        "post_grad_custom_post_pass": with_last(inductor.setting("post_grad_custom_post_pass"), InOrder(budget)),
        "reorder_for_peak_memory": False,
    }


def early_aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], budget: Budget) -> Callable[..., Any]:
    """torch's backend of that name, with graphs in which exchanges start early. Views become reshapes: fake kernels may
    have other strides than the real ones (torch 2.13: elu_backward of operands with different strides). Draws stay
    whole, for nothing fuses what they are made of."""
    for node in gm.graph.find_nodes(op="call_function", target=operators.draw.default):
        node.target = operators.drawn.default

    def ordered(graph: fx.GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        order(graph.graph, budget)

    return dynamo.aot_eager(gm, example_inputs, Split(), ordered)  # type: ignore[no-any-return]
