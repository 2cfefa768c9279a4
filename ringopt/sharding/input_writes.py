"""Inputs that the program writes to: what autograd, and what a backward, may see of the write.

    copy_(weight, y)                ->   copy_(detach(weight), detach(y)), where `weight` has a gradient
    copy_(count, count + 1)         ->   copy_(count, snapshot(count) + 1), where a gradient may read what it was

A view of a written input that the program returns shows the write, and is of the input itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from ringopt.calls import OpCall
from ringopt.ir.memory import line
from ringopt.ir.nodes import named, origin, requires_grad, value_of
from ringopt.ir.notes import PLACEMENT, UNSEEN, WHOLE
from ringopt.ops import operators

aten = torch.ops.aten


def write_unseen(graph: fx.Graph) -> None:
    """Inputs with a gradient get the values that the program has written to them where autograd did not see it."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, value = named(node, "self"), named(node, "src")
        if not (node.meta.get(UNSEEN) and value_of(target).requires_grad):
            continue
        with graph.inserting_before(node):
            node.args = tuple(graph.call_function(aten.detach.default, (arg,)) for arg in (target, value))
        for part in node.args:
            placement = part.all_input_nodes[0].meta.get(PLACEMENT)
            part.meta = {**origin(node), PLACEMENT: placement, "val": value_of(target).detach()}


def keep_before_writes(graph: fx.Graph) -> bool:
    """What is computed from an input before it is written reads a copy of it, where a gradient may need that again.
    Whether there is any."""
    written = {named(node, "self") for node in graph.find_nodes(op="call_function", target=aten.copy_.default)
               if not node.meta.get(UNSEEN)}  # fmt: skip
    inputs = [x for x in written if x.op == "placeholder" and not value_of(x).requires_grad]
    learns = requires_grad(graph) if inputs else {}
    for x in inputs:
        shown = returned_views(graph, x)
        users = [user for user in x.users if user.op != "output" and user not in shown]
        readers = [user for user in users if user.target is not aten.copy_.default]
        if not any(learns[node] for node in reached(readers)):
            continue
        with graph.inserting_after(x):
            before = OpCall.to(operators.snapshot.default, x=x).insert(graph)
        before.meta = {**origin(x), PLACEMENT: x.meta.get(PLACEMENT), WHOLE: x.meta.get(WHOLE), "val": value_of(x)}
        for user in readers:
            user.replace_input_with(x, before)
    return has_copies(graph)


def returned_views(graph: fx.Graph, x: fx.Node) -> set[fx.Node]:
    """The views of `x` that are returned, and what they are views of, made anew for that alone."""
    output, anew = graph.output_node(), dict[fx.Node, fx.Node]()
    for out in output.all_input_nodes:
        views = list(line(out))
        if views[-1] is not x:
            continue
        for view in reversed(views[:-1]):
            if view not in anew:
                with graph.inserting_before(output):
                    anew[view] = graph.node_copy(view, lambda y: anew.get(y, y))
    output.args = fx.map_arg(output.args, lambda y: anew.get(y, y))
    for view in reversed(anew):
        if not view.users:
            graph.erase_node(view)
    return set(anew.values())


def has_copies(graph: fx.Graph) -> bool:
    """Whether something reads what an input was before it is written. Behind torch's partitioner its gradient is wrong
    otherwise (ringopt/ops/snapshot.py)."""
    return bool(graph.find_nodes(op="call_function", target=operators.snapshot.default))


def reached(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that is computed from `nodes`, themselves included."""
    found, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.users)
    return found
