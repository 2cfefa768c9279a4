"""All-gathers and all-reduces, started as soon as their operand is computed and waited for before their first reader.

    y = mm(h, w)                           y = mm(h, w)
    loss = ...                  ->         ticket = gather_start(y, ...)
    whole = gather(y, ...)                 loss = ...
    return loss, whole                     whole = gather_finish(ticket, y, ...)

In two steps, over the graphs that AOTAutograd makes. First each collective moves up as far as it may, past messages
that it does not depend on (`advance`). Where to is decided by operators that send, by dependencies and by global sizes,
and by nothing else: a partitioner may recompute other nodes on one rank than on another, and all ranks must post their
messages in one order. Then each is split into a start and a finish where there is enough computation to hide it, and a
bucket of gradients to hold less memory (`part`): each rank decides that alone, for both forms post the same message.

Buffers of collectives that start early live longer. A collective moves up no further than where all buffers in flight
fit into `Budget.in_flight`. All-reduces of parameters' gradients are in place of the gradients, so they do not count.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.dims.products import is_product
from ringopt.ir.nodes import op_name, origin, value_of
from ringopt.ops import operators
from ringopt.ops.traits import attends, is_halved, is_start, sends, starts_exchange
from ringopt.overlap.reorder import (
    dependents_among,
    element_count,
    is_fixed,
    product_flops,
    sources_among,
)


@dataclass(frozen=True)
class Budget:
    """The limits of early starts, the same on all ranks; the defaults are those of a graph without attention.

    ranks       that share a sequence
    in_flight   bytes of all buffers in flight at most
    rate        FLOP/s of the computation that hides them
    step        seconds of overhead of a start and a finish
    """

    ranks: int = 0
    in_flight: int = 1 << 30
    rate: float = 1e9
    step: float = 0.0

    def pays(self, nodes: Iterable[fx.Node]) -> bool:
        """Whether `nodes` take long enough to hide messages behind."""
        found = list(nodes)
        seconds = [product_flops(node) / self.rate for node in found if is_product(node)]
        return any(map(attends, found)) or (bool(seconds) and sum(seconds) >= self.step)


def collect_early(graph: fx.Graph, budget: Budget, held: dict[fx.Node, float]) -> None:
    """Starts collectives early, in place. `held`: bytes that are in flight already where a message is posted."""
    collectives = collectives_of(graph)
    advance_all(collectives, held, budget.in_flight)
    for number, node in enumerate(collectives):
        part(node, number, budget)


def collectives_of(graph: fx.Graph) -> list[fx.Node]:
    """The collectives that `split` parts into a start and a finish."""
    return [node for node in graph.nodes if is_halved(node)]


# ---- where it starts -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class HeldBack:
    """A collective that starts later than its operands allow, since `under_way` bytes would exceed the limit, `size` of
    them its own."""

    node: fx.Node
    size: float
    under_way: float


def advance_all(collectives: Sequence[fx.Node], held: dict[fx.Node, float], bound: int) -> list[HeldBack]:
    """Moves each collective up as far as it may, in place; returns those that the bound holds back."""
    placed: set[fx.Node] = set()
    found = []
    for node in collectives:
        found.append(advance(node, placed, held, bound))
        placed.add(node)
    return [one for one in found if one is not None]


def advance(node: fx.Node, placed: set[fx.Node], held: dict[fx.Node, float], bound: int) -> HeldBack | None:
    """Moves a collective to after the last message that it depends on, and after those `placed` there before. Its other
    dependencies are computed before the message that follows."""
    nodes = list(node.graph.nodes)
    place = {other: i for i, other in enumerate(nodes)}
    made_of = sources_among(nodes[: place[node]], node.all_input_nodes)
    posts = [other for other in nodes[: place[node]] if sends(other) and not starts_exchange(other)]
    crossed: list[fx.Node] = []
    size = gathered_bytes(node)
    while posts and posts[-1] not in made_of and held.get(posts[-1], 0) + size <= bound:
        crossed.insert(0, posts.pop())
    beyond = list(takewhile(lambda other: other not in made_of, reversed(posts)))
    stopped = None
    if not placed.issuperset(beyond):
        stopped = HeldBack(node, size, held.get(beyond[0], 0) + size)
    while crossed and crossed[0] in placed:
        posts.append(crossed.pop(0))
    following = crossed[0] if crossed else node
    late = [other for other in nodes[place[following] : place[node]] if other in made_of]
    if any(map(is_fixed, late)):
        return None  # random numbers and writes keep their places
    for other in late:
        following.prepend(other)
    begin = place[posts[-1]] if posts else 0
    before = [other for other in nodes[begin : place[following]] if other in made_of or is_start(other)]
    after = max([*before, *posts[-1:]], key=place.__getitem__, default=nodes[0]) if not late else late[-1]
    order = list(node.graph.nodes)
    behind = next(other for other in order[order.index(after) + 1 :] if other.op != "placeholder")
    if behind is not node:
        behind.prepend(node)
    for other in crossed:
        held[other] = held.get(other, 0) + size
    return stopped


def gathered_bytes(node: fx.Node) -> float:
    """Bytes that an early start holds longer: of the global value, the same on all ranks."""
    if op_name(node) == "reduce_bucket":
        return 0
    value = value_of(node)
    return element_count(value.shape) * int(value.element_size())


# ---- what it is hidden behind ----------------------------------------------------------------------------------------
def part(node: fx.Node, number: int, budget: Budget) -> None:
    """Splits a collective into a start and a finish before its first reader, if the computation between them pays:
    nodes that depend on neither are moved between, up to the next fixed node. A bucket of gradients is always split:
    the gradients are freed between the halves, so that there are never more than two copies."""
    nodes = list(node.graph.nodes)
    place = {other: i for i, other in enumerate(nodes)}
    several = list(node.users) if op_name(node) == "reduce_bucket" else []
    readers = [reader for one in (several or [node]) for reader in one.users]
    if not readers or (op_name(node) != "gather" and not has_known_sizes(node)):
        return
    reader = min(readers, key=place.__getitem__)
    between = nodes[place[node] + 1 : place[reader]]
    if not budget.pays(between):
        after = list(takewhile(lambda other: not is_fixed(other) and other.op != "output", nodes[place[reader] :]))
        late = dependents_among([node, *several, *after], [node])
        free = [other for other in after if other not in late]
        if budget.pays(free):
            for other in free:
                reader.prepend(other)
        elif not several:
            return
    if op_name(node) == "gather":
        _halve_gather(node, reader, number)
    else:
        halve_sum(node, several, reader, number)


def has_known_sizes(node: fx.Node) -> bool:
    """Whether all sizes of the result are ints: they are arguments of the second half."""
    return all(isinstance(size, int) for value in _values_of(node) for size in value.shape)


def _values_of(node: fx.Node) -> Sequence[torch.Tensor]:
    value = value_of(node)
    return value if isinstance(value, (tuple, list)) else [value]


def _halve_gather(node: fx.Node, reader: fx.Node, number: int) -> None:
    graph, call = node.graph, OpCall.of(node)
    with graph.inserting_before(node):
        start = call.of_half(operators.gather_start.default, number=number).insert(graph)
    start.meta = {**origin(node), "val": _ticket_value(value_of(node))}
    with graph.inserting_before(reader):
        finish = call.of_half(operators.gather_finish.default, ticket=start).insert(graph)
    finish.meta = {**origin(node), "val": value_of(node)}
    node.replace_all_uses_with(finish)
    graph.erase_node(node)


def halve_sum(node: fx.Node, several: Sequence[fx.Node], reader: fx.Node, number: int) -> None:
    """Splits the all-reduce of one value, or of a bucket whose results are `several`."""
    graph, call, values = node.graph, OpCall.of(node), _values_of(node)
    with graph.inserting_before(node):
        summed = call["grads"] if op_name(node) == "reduce_bucket" else [call["x"]]
        begin = OpCall.to(operators.reduce_start.default, grads=summed, number=number, group=call["group"])
        start = begin.insert(graph)
    start.meta = {**origin(node), "val": _ticket_value(values[0])}
    sizes, dims = [size for value in values for size in value.shape], [value.dim() for value in values]
    made = {"sizes": sizes, "dims": dims, "dtype": values[0].dtype, "device": values[0].device}
    with graph.inserting_before(reader):
        finish = OpCall.to(operators.reduce_finish.default, ticket=start, **made, group=call["group"]).insert(graph)
        finish.meta = {**origin(node), "val": list(values)}
        result = finish
        if not several:
            result = graph.call_function(operator.getitem, (finish, 0))
            result.meta = {**origin(node), "val": values[0]}
    for one in several:
        reader.prepend(one)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _ticket_value(like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((), dtype=torch.int64, device="cpu")
