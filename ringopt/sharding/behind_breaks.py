"""Where a sequence begins in a graph behind a graph break: at values that the graph before it had in rows.

    def resumed(y): return linear(y)   ->   linear(scatter(y, n))

An input that is whole is cut where products read it, or what is made of it; what reads all of it has it as it came. A
graph without products would gain nothing, and gather what it returns. Nor is a cache of keys cut, to which attention
adds new ones: the ranks would exchange rows to make it longer, and gather it to return it. Where no graph before had
rows, and nothing in this one mixes tokens, an input is cut along a dim that its layers keep.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.fx as fx

from ringopt.context_parallel.geometry.layouts import chunks_per_rank
from ringopt.dims.contraction_rules import PRODUCTS
from ringopt.dims.op_families import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from ringopt.dims.origin import is_row, is_weight, origins
from ringopt.dims.rules import rule_of
from ringopt.ir.memory import line
from ringopt.ir.nodes import named, op_name, outputs_of, tensor_args
from ringopt.ir.placement import Layouts, Sharded
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops import operators
from ringopt.rules.declare import declaration_of, is_foreign

EVEN = 16  # rows of a rank, of which one more or less is no matter

# Where most of the work of a program is.
WEIGHTY = frozenset((*PRODUCTS, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS))


def worth_cutting(
    graph: fx.Graph, cuts: Mapping[fx.Node, Sharded], layouts: Layouts, ranks: int
) -> dict[fx.Node, Sharded]:
    """Of inputs that may be cut, those that are to be."""
    if not cuts:
        return {}
    kept, worked = memory_of_program(graph) | caches(graph), above_products(graph)
    enough = {at: at_hand(at.length) >= chunks_per_rank(layouts.of(at.length)) * ranks for at in cuts.values()}
    return {node: at for node, at in cuts.items() if node not in kept and node in worked and enough[at]}


def reach_products(graph: fx.Graph, cuts: Mapping[fx.Node, Sharded]) -> bool:
    """Whether a product reads rows of an input where they are cut. What is sampled by one of another number, and the
    places to sample at, lead no rows to it."""
    for node in graph.nodes:
        rule, operands = (rule_of(node), list(tensor_args(node))) if op_name(node) in WEIGHTY else (None, [])
        for x, dims in zip(operands, rule.operands if rule is not None else (), strict=False):
            found = {origin for dim in dims.values() for origin in origins(x, dim)}
            if any(origin.node in cuts and origin.place == cuts[origin.node] for origin in found):
                return True
    return False


def kept_rows(graph: fx.Graph, ranks: int) -> dict[fx.Node, Sharded]:
    """Each input of a graph whose layers work row by row, as parts of a model between graph breaks do: in the innermost
    of the dims that they keep and that give every rank EVEN rows, or else in the longest. None where an operator of
    another library may be an attention."""
    found = defaultdict[fx.Node, set[Sharded]](set)
    if any(is_foreign(node) and declaration_of(node) is None for node in graph.nodes):
        return {}
    for node in graph.nodes:
        rule, operands = (rule_of(node), list(tensor_args(node))) if op_name(node) in PRODUCTS else (None, [])
        if rule is None or not any(map(is_weight, operands)):
            continue
        for x, dims in zip(operands, rule.operands, strict=True):
            for origin in {origin for dim in dims.values() for origin in origins(x, dim) if is_row(origin)}:
                if origin.place is not None:
                    found[origin.node].add(origin.place)
    most = EVEN * ranks
    return {x: max(places, key=lambda at: (min(at_hand(at.length), most), at.dim)) for x, places in found.items()}


def memory_of_program(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that the program writes to, or that it returns, or views of them."""
    written = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    returned = [out for out in outputs_of(graph) if isinstance(out, fx.Node)]  # others are sizes
    return {named(node, "self") for node in written} | {base for out in returned for base in line(out)}


def caches(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that a graph with attention only makes longer (`cat([past, k], 2)`)."""
    if not graph.find_nodes(op="call_function", target=operators.attention.default):
        return set()
    inputs = graph.find_nodes(op="placeholder")
    return {node for node in inputs if node.users and all(op_name(user) == "cat" for user in node.users)}


def above_products(graph: fx.Graph) -> set[fx.Node]:
    """What products and convolutions read, or what that is made of."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        if op_name(node) in WEIGHTY or not found.isdisjoint(node.users):
            found.add(node)
    return found
