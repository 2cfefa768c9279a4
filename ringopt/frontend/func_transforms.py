"""Transforms of torch.func (vmap, grad, vjp, jacrev) as calls of one operator, which runs what stands between.

    a = _add_batch_dim(x, 0, 1); b = a.sin(); y = _remove_batch_dim(b, 1, 2, 0)     ->     y = torch_func(graph, x)[0]

What happens between the beginning and the end of a transform runs on tensors of its own, so no pass can look at it: it
is kept whole, as torch.cond is, and what stands around it is sharded. Only a vmap is written out
(ringopt/ops/torch_func.py).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx
from torch import Tensor

from ringopt.frontend import flex
from ringopt.frontend.flatten import is_inline
from ringopt.ir.symbolic_sizes import OPEN
from ringopt.ops.torch_func import TORCH_FUNC
from ringopt.torch_compat.transforms import depth_after, is_forward_mode, is_unwrapped

# Begins nothing: it fills tables of torch's, which is done once, where the transforms are run.
LOADS_A_TABLE = "lazy_load_decompositions"


def with_transforms_as_calls(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph in which each stretch that torch.func runs is a call, in graphs that are written out in
    line too; `gm` itself if there is none, or one that does not end."""
    gm = without_leaf_marks(gm)
    nodes = list(gm.graph.nodes)
    regions = {name: with_transforms_as_calls(region) for name, region in graphs_in_line(gm)}
    regions = {name: region for name, region in regions.items() if region is not getattr(gm, name)}
    found = stretches(nodes)
    if not found and not regions:
        return gm
    made, copies, at = fx.GraphModule(gm, gm.graph), dict[fx.Node, fx.Node](), 0
    for name, region in regions.items():
        setattr(made, name, region)
    made.graph = fx.Graph()
    for number, (first, end) in enumerate(found):
        copy_into(made.graph, copies, nodes[at:first])
        call_of(made, f"torch_func_{number}", nodes[first:end], copies)
        at = end
    copy_into(made.graph, copies, nodes[at:])
    made.recompile()
    return made


def graphs_in_line(gm: fx.GraphModule) -> Iterator[tuple[str, fx.GraphModule]]:
    """The graphs that regions of a program are, such as checkpointed ones, by name."""
    for node in gm.graph.nodes:
        for given in node.all_input_nodes if is_inline(node.target) else ():
            graph = getattr(gm, str(given.target), None) if given.op == "get_attr" else None
            if isinstance(graph, fx.GraphModule):
                yield str(given.target), graph


def copy_into(graph: fx.Graph, copies: dict[fx.Node, fx.Node], nodes: Sequence[fx.Node]) -> None:
    """Notes them in `copies`."""
    for node in nodes:
        if flex.calls_functorch(node) and node.target.__name__ == LOADS_A_TABLE:
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)


def stretches(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Where transforms begin and where what they make has been read. Empty if one does not end, or is of another kind.

    What vjp returns is called behind its end, on tensors of before: only plain tensors leave a stretch."""
    found, past = list[tuple[int, int]](), 0
    places = {node: place for place, node in enumerate(nodes)}
    for first, end in nestings(nodes):
        if first < past:
            first, _ = found.pop()
        past = max(past, end)
        while (further := last_read(nodes[first:past], places) + 1) > past:
            past = further
        found.append((first, past))
    within = {place for first, end in found for place in range(first, end)}
    others = [node for place, node in enumerate(nodes) if place not in within and flex.calls_functorch(node)]
    return found if all(node.target.__name__ == LOADS_A_TABLE for node in others) else []


def nestings(nodes: Sequence[fx.Node]) -> list[tuple[int, int]]:
    """Where no transform is open, one begins, and none is open again; empty if one does not end."""
    found, depth, begin = list[tuple[int, int]](), 0, 0
    for place, node in enumerate(nodes):
        before, depth = depth, depth_after(node.target, depth)
        if before == 0 and depth:
            begin = place
        elif before and depth == 0 and any(map(flex.calls_functorch, nodes[begin:place])):
            found.append((begin, place + 1))
    return [] if depth or any(is_forward_mode(node.target) for node in nodes) else found


def last_read(inside: Sequence[fx.Node], places: Mapping[fx.Node, int]) -> int:
    """Where the last one stands that reads what is no plain tensor of those `inside`."""
    wrapped = (node for node in inside if not is_unwrapped(flex.example(node)))
    return max((places[user] for node in wrapped for user in node.users), default=-1)


def call_of(made: fx.GraphModule, name: str, inside: Sequence[fx.Node], copies: dict[fx.Node, fx.Node]) -> None:
    """Puts a call at the end of the graph of `made` in the place of the nodes `inside`."""
    sizes = sizes_among(inside)
    copy_into(made.graph, copies, sizes)
    inside = [node for node in inside if node not in copies]
    own, within = fx.Graph(), set(inside)
    operands = list(dict.fromkeys(x for node in inside for x in node.all_input_nodes if x not in within))
    constants = [x for x in operands if x.op == "get_attr"]
    operands = [x for x in operands if x.op != "get_attr"]
    inner = {x: own.placeholder(x.name) for x in operands}
    copy_into(own, inner, constants)
    copy_into(own, inner, inside)
    results = [node for node in inside if any(user not in within for user in node.users)]
    if not results:  # nobody reads them; what it may write is seen where the call is looked at
        results = [node for node in inside if isinstance(value := flex.example(node), Tensor) and is_unwrapped(value)]
        results = results[-1:]
    own.output(tuple(inner[node] for node in results))
    setattr(made, name, fx.GraphModule(made, own))
    graph = made.graph
    call = graph.call_function(TORCH_FUNC, (graph.get_attr(name), *(copies[x] for x in operands)))
    call.meta = {**(results or inside)[-1].meta, "example_value": tuple(map(flex.example, results))}
    for place, node in enumerate(results):
        copies[node] = graph.call_function(operator.getitem, (call, place))
        copies[node].meta = dict(node.meta)


def sizes_among(inside: Sequence[fx.Node]) -> list[fx.Node]:
    """What is counted there of numbers from before alone. Dynamo writes it once, for what stands behind too."""
    within, found = set(inside), dict[fx.Node, None]()
    for node in inside:
        if isinstance(flex.example(node), OPEN) and all(x in found or x not in within for x in node.all_input_nodes):
            found[node] = None
    return list(found)


# ---- values that are made leaves -------------------------------------------------------------------------------------
ALLOWS_A_LEAF = "set_inplace_requires_grad_allowed"


def without_leaf_marks(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy without `x.requires_grad_()` of what is made where nothing is recorded (models that checkpoint do so to
    their embeddings, in evaluation too), which does nothing. `gm` itself where one does."""
    marks = [node for node in gm.graph.nodes if is_leaf_mark(node)]
    if not marks or records(gm):
        return gm
    around = {mark: (mark.prev, mark, mark.next) for mark in marks}
    dropped = {node for nodes in around.values() for node in nodes}
    made, copies = fx.GraphModule(gm, gm.graph), dict[fx.Node, fx.Node]()
    made.graph = fx.Graph()
    for node in gm.graph.nodes:
        if node in around:
            copies[node] = copies[node.args[0]]
        elif node not in dropped:
            copies[node] = made.graph.node_copy(node, copies.__getitem__)
    made.recompile()
    return made


def is_leaf_mark(node: fx.Node) -> bool:
    """Whether it is such a call, as Dynamo writes it, on no input of the graph."""
    allowed = (flex.calls_functorch(x) and x.target.__name__ == ALLOWS_A_LEAF for x in (node.prev, node.next))
    called = node.op == "call_method" and node.target == "requires_grad_" and len(node.args) == 1 and not node.kwargs
    return called and all(allowed) and node.args[0].op not in ("placeholder", "get_attr")


def records(gm: fx.GraphModule) -> bool:
    """Whether anything has a gradient by what Dynamo traced it with, or an output is a leaf."""
    values = [flex.example(node) for node in gm.graph.nodes if node.op not in ("placeholder", "get_attr")]
    outputs = [flex.example(node) for node in gm.graph.output_node().all_input_nodes]
    recorded = any(isinstance(value, Tensor) and value.grad_fn is not None for value in values)
    return recorded or any(isinstance(value, Tensor) and value.requires_grad for value in outputs)
