"""Exchanges started early, in the graphs that AOTAutograd makes: forward and backward, each by itself.

    q = mm(x, wq)                             k, v = ...
    k, v = ...                                ticket = ring_start(k, v, ...)
    y = ring_attention(q, k, v, ...)    ->    q = mm(x, wq)
                                              y = ring_attention(q, k, v, ..., ticket)

The first messages of an attention carry keys and values (in the backward, saved ones), and travel while whatever needs
neither is computed: the projection of the queries, a branch beside it, in the backward the gradients of the layers
behind. This is list scheduling with one link: what leads to K and V goes first, then the start, then the rest. The next
exchange starts when the one before it is done, so no more than one is under way, and none holds more than it would have
held without.

Whether an attention is started early is said in its arguments (passes/schedule.py decides, by facts that all ranks
share). In the backward it may also end late: the last sums of dK and dV come home while what needs neither is computed
(`finish_late`), the gradient of that projection first of all. Gathers and sums over the ranks start early too
(ringopt/overlap/async_collectives.py).

Where an exchange starts is decided here, by operators that send and by nothing else, for a partitioner may recompute
other things on one rank than on another: all ranks post their messages in one order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.products import is_product
from ringopt.ir.nodes import named, op_name, origin, shape_of, value_of
from ringopt.ops import operators
from ringopt.ops.dilated import Config as DilatedConfig
from ringopt.ops.ring import Config
from ringopt.ops.traits import TABLE, attends, exchanges, is_start, starts_keys, talks
from ringopt.overlap.async_collectives import Budget, collect_early
from ringopt.overlap.collective_order import Lockstep
from ringopt.overlap.in_flight import first_bytes
from ringopt.overlap.reorder import dependents_among, is_fixed, sources_among
from ringopt.overlap.row_major import say_row_major
from ringopt.torch_compat import dynamo
from ringopt.torch_compat.inductor_passes import OrderedSet


@dataclass(frozen=True)
class Gap:
    """What stands before an attention and can be ordered anew: what its K and V are made of, and what they need not
    wait for."""

    needed: Sequence[fx.Node]
    free: Sequence[fx.Node]

    @property
    def products(self) -> list[fx.Node]:
        return [node for node in self.free if is_product(node)]


def is_dilated(body: fx.Node) -> bool:
    return op_name(body).startswith("dilated")


def gap_before(body: fx.Node) -> Gap:
    """From the exchange before `body` on, or from what K and V need that may not change places: messages, random
    numbers, writes."""
    between: list[fx.Node] = []
    for node in body.graph.nodes:
        if node is body:
            break
        if exchanges(node):
            between.clear()
        elif node.op not in ("placeholder", "output"):
            between.append(node)
    lengths = ("length",) if is_dilated(body) else ("q_length", "kv_length")
    taken = [named(body, name) for name in ("k", "v", *lengths)]  # by `ring_start`, `dilated_start`
    needed = sources_among(between, [x for x in taken if isinstance(x, fx.Node)])
    last = max((place for place, node in enumerate(between) if node in needed and is_fixed(node)), default=-1)
    rest = between[last + 1 :]
    return Gap([node for node in rest if node in needed], [node for node in rest if node not in needed])


# ---- the graphs ------------------------------------------------------------------------------------------------------
def order(graph: fx.Graph, budget: Budget) -> None:
    """In place: messages begin as early and are waited for as late as they can be."""
    finish_late(graph)
    start_early(graph)
    bodies = [finish_of(node) for node in graph.nodes if starts_keys(node)]
    collect_early(graph, budget, {body: first_bytes(body, budget.ranks) for body in bodies})


def start_early(graph: fx.Graph) -> None:
    """In place, for each attention of which that is asked. What stands behind one in the forward and does not need it
    is computed before it as well."""
    bodies = [node for node in graph.nodes if attends(node)]
    for number, body in enumerate(bodies):
        if (way := attends(body)) in named(body, "early").split():
            beside = beside_of(body) if way == "forward" else []
            if any(map(is_product, beside)):
                for node in beside:
                    body.prepend(node)
            start(body, gap_before(body), number)


def beside_of(body: fx.Node) -> list[fx.Node]:
    """What stands behind an attention and does not need it, up to the next node that has its place."""
    nodes = list(body.graph.nodes)
    after = list(takewhile(movable, nodes[nodes.index(body) + 1 :]))
    needing = set(dependents_among([body, *after], [body]))
    return [node for node in after if node not in needing]


def movable(node: fx.Node) -> bool:
    return not is_fixed(node) and node.op != "output"


def start(body: fx.Node, gap: Gap, number: int) -> None:
    first = gap.free[0] if gap.free else body
    for node in gap.needed:
        first.prepend(node)
    fields = (DilatedConfig if is_dilated(body) else Config)._fields
    config = [named(body, name) for name in fields[: fields.index("early")]]
    backward, traits = attends(body) == "backward", TABLE[op_name(body)]
    k, v = named(body, "k"), named(body, "v")
    heads = shape_of(named(body, "q"))[1]
    begin = getattr(operators, traits.start).default
    with body.graph.inserting_before(first):
        ticket = body.graph.call_function(begin, (k, v, heads, backward, number, *config))
    ticket.meta = {**origin(body), "val": value_of(k).new_empty((), dtype=torch.int64, device="cpu")}
    body.args = (*body.args, ticket)
    if "eager_input_vals" in body.meta:  # where Inductor reads how the operands lie in memory
        values, keywords = body.meta["eager_input_vals"]
        body.meta["eager_input_vals"] = ((*values, value_of(ticket)), keywords)


def finish_late(graph: fx.Graph) -> None:
    """In place, for each backward of which that is asked: what needs no dK and dV, up to the next node that has its
    place, goes before what does, and they are waited for between the two. Also where that is little on this rank, for
    what a partitioner made of it: another rank waits there, and no message may go past the one and not the other."""
    for body in graph.find_nodes(op="call_function", target=operators.ring_attention_backward.default):
        parts = {user.args[1]: user for user in body.users}
        grads = [parts[i] for i in (1, 2) if i in parts]
        if "home" not in named(body, "early").split() or not grads:
            continue
        nodes = list(graph.nodes)
        after = list(takewhile(movable, nodes[nodes.index(body) + 1 :]))
        late = dependents_among(after, grads)
        free = [node for node in after if node not in late]
        for node in free:
            late[0].prepend(node)
        part_home(body, parts, late[0])


def part_home(body: fx.Node, parts: dict[Any, fx.Node], place: fx.Node) -> None:
    """`body` in two, of which the second stands before `place`. `parts`: its results, by number."""
    graph, (dq, dk, dv, dsources) = body.graph, value_of(body)
    ticket_value = dk.new_empty((), dtype=torch.int64, device="cpu")
    with graph.inserting_before(body):
        begin = graph.call_function(operators.ring_backward_begin.default, body.args, dict(body.kwargs))
        results = [graph.call_function(operator.getitem, (begin, number)) for number in range(3)]
    begin.meta = {**body.meta, "val": (dq, ticket_value, dsources)}
    for node, value in zip(results, (dq, ticket_value, dsources), strict=True):
        node.meta = {**origin(body), "val": value}
    keys = (named(body, "k"), named(body, "v"), named(body, "group"))
    with graph.inserting_before(place):
        finish = graph.call_function(operators.ring_backward_finish.default, (results[1], *keys))
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
    """Starts early, and holds Inductor to it: what is computed meanwhile waits for the start, and the attention waits
    for what is computed meanwhile."""

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
            # Gathers and sums go on for long: what follows follows the first.
            long = op_name(ticket) in ("reduce_start", "gather_start")
            for node in meanwhile[:1] if long else meanwhile:
                found.setdefault(node, OrderedSet()).add(ticket)
            for node in meanwhile[-1:] if long else meanwhile:
                found.setdefault(finish, OrderedSet()).add(node)
        places = {node: place for place, node in enumerate(graph.nodes)}
        return dict(sorted(found.items(), key=lambda tie: places[tie[0]]))

    def uuid(self) -> str:
        return f"{super().uuid()}, early 6, {self.budget}"


def finish_of(start: fx.Node) -> fx.Node:
    """The operator that is given its ticket."""
    ticket = start
    if op_name(start) == "ring_backward_begin":
        ticket = next(part for part in start.users if part.args[1] == 1)
    (finish,) = ticket.users
    return finish


def products_between(ticket: fx.Node, finish: fx.Node) -> list[fx.Node]:
    nodes = list(ticket.graph.nodes)
    return [node for node in nodes[nodes.index(ticket) : nodes.index(finish)] if is_product(node)]


def inductor_settings(gm: fx.GraphModule, budget: Budget) -> dict[str, Any]:
    """For compile_fx, which hands them to the backward too, however late that is compiled; none for a graph of one
    process. What Inductor reorders to save memory it reorders by sizes, and these differ by rank."""
    if not any(map(talks, gm.graph.nodes)):
        return {}
    return {"post_grad_custom_post_pass": InOrder(budget), "reorder_for_peak_memory": False}


def aot_eager(gm: fx.GraphModule, example_inputs: Sequence[Any], budget: Budget) -> Callable[..., Any]:
    """torch's backend of that name, with graphs in which exchanges start early. A view may be a copy: fake kernels tell
    other strides than the real ones have (torch 2.13: elu_backward of operands that lie differently)."""

    def ordered(graph: fx.GraphModule) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        order(graph.graph, budget)

    return dynamo.aot_eager(gm, example_inputs, ordered)  # type: ignore[no-any-return]
