"""Which nodes of a graph may be reordered, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.products import summed
from ringopt.ir.nodes import is_random, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.ops.traits import sends
from ringopt.torch_compat.schema import HigherOrderOperator, OpOverload, schema_of


def sources_among(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Those of `nodes`, in topological order, that `wanted` depend on."""
    found = set(wanted)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found.intersection(nodes)


def dependents_among(nodes: Sequence[fx.Node], first: Sequence[fx.Node]) -> list[fx.Node]:
    """`first` and those of `nodes`, in topological order, that depend on them."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in first or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return list(found)


def is_fixed(node: fx.Node) -> bool:
    """Whether a node keeps its place among nodes of its kind: communication, random numbers, writes, higher-order
    ops."""
    if isinstance(node.target, OpOverload):
        return sends(node) or is_random(node) or schema_of(node.target).is_mutable
    return isinstance(node.target, HigherOrderOperator) or node.op == "call_module"


def product_flops(node: fx.Node, ranks: int = 1) -> float:
    """FLOPs of a product, 2 a multiplication. From global sizes where the passes noted a placement, divided by `ranks`:
    the same number on all ranks, whatever their shards. Of a fused attention, and of the backward of a convolution, a
    lower bound; infinite where a size is known only at run time."""
    operand, first = summed(node)
    spread = any(x.meta.get(PLACEMENT) is not None for x in (node, node.args[0], operand))
    return 2 * element_count((*sizes_of(node), *sizes_of(operand)[first:])) / (ranks if spread else 1)


def sizes_of(node: fx.Node) -> list[Any]:
    """Sizes of the global value of a node, whatever shard this rank has."""
    whole, placement = node.meta.get(WHOLE), node.meta.get(PLACEMENT)
    value = value_of(node) if whole is None else whole
    if isinstance(value, (tuple, list)):  # the backward of a convolution has None where no gradient is asked for
        value = next(one for one in value if one is not None)
    sizes = list(value.shape)
    if whole is None and placement is not None:
        sizes[placement.dim] = placement.size
    return sizes


def element_count(sizes: Sequence[Any]) -> float:
    """The product of sizes, by their hints; infinite where one is known only at run time."""
    unknown = any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)
    return inf if unknown else prod(map(at_hand, sizes))
