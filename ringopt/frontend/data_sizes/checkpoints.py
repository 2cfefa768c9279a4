"""Checkpointed regions in which data decide, written out in line.

    y = checkpoint(f, x)       ->      the nodes of f, which remember that they were in a region

What takes sizes out of a graph (stretches.py, predication.py) works on one graph. Other regions stay graphs of their
own, which are written out later (frontend/flatten.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch.fx as fx

from ringopt.frontend.data_sizes.fake_values import fake_value, is_unknown
from ringopt.frontend.flatten import CHECKPOINT, is_inline
from ringopt.ir.checkpoint_regions import WrittenOut
from ringopt.ir.notes import CHECKPOINTED


def write_out(gm: fx.GraphModule) -> Callable[[fx.Node], fx.Node]:
    """Changes Dynamo's graph. Returns what says which node stands there for one that was in a region."""
    now = dict[fx.Node, fx.Node]()
    for node in list(gm.graph.nodes):
        body = body_of(gm, node)
        if body is not None and decides_inside(body):
            now |= in_line(gm, node, body)
    for node in now:
        while now[node] in now:
            now[node] = now[now[node]]
    return lambda node: now.get(node, node)


def body_of(gm: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that a checkpoint calls."""
    if not is_inline(node.target) or node.target.name() != CHECKPOINT:
        return None
    first = node.args[0]
    found = attrgetter(str(first.target))(gm) if isinstance(first, fx.Node) and first.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None


def decides_inside(body: fx.GraphModule) -> bool:
    """Whether anything has a size, or a number, that data decide, in it or in a region within it."""
    inner = [found for node in body.graph.nodes if (found := body_of(body, node)) is not None]
    return any(is_unknown(fake_value(node)) for node in body.graph.nodes) or any(map(decides_inside, inner))


def in_line(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Writes the `body` of a `call` in its place, and those of calls within it."""
    graph, prefix = gm.graph, str(call.args[0].target)
    region = WrittenOut(body.meta.get("_checkpoint_context_fn"), call.meta.get(CHECKPOINTED))
    now: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True))
    with graph.inserting_before(call):
        results = graph.graph_copy(body.graph, now)
    inside = [now[node] for node in body.graph.nodes if node.op not in ("placeholder", "output")]
    for node in inside:
        node.meta[CHECKPOINTED] = region
        if node.op in ("get_attr", "call_module"):
            node.target = f"{prefix}.{node.target}"
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)
    for node in inside:
        within = body_of(gm, node)
        if within is not None:
            now |= in_line(gm, node, within)
    return now
