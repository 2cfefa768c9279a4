"""What of a graph may change places, and what takes long enough to hide messages behind."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator

from ringopt.ir.nodes import is_random, op_name, value_of
from ringopt.ir.notes import PLACEMENT, WHOLE
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.overlap.collective_order import sends

KEYS_FIRST = ("ring_start", "dilated_start")
STARTS = (*KEYS_FIRST, "reduce_start", "gather_start", "ring_backward_begin")
# Convolutions and fused attention have many names (convert_element_type is no convolution).
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "attention")
PARTS_OF_PRODUCTS = ("convolution", "conv1d", "conv2d", "conv3d", "conv_", "scaled_dot_product")


def sources_among(nodes: Sequence[fx.Node], wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """Of `nodes`, in order, those that `wanted` are made of."""
    found = set(wanted)
    for node in reversed(nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found.intersection(nodes)


def dependents_among(nodes: Sequence[fx.Node], first: Sequence[fx.Node]) -> list[fx.Node]:
    """Of `nodes`, in order, `first` and those that are made of them."""
    found: dict[fx.Node, None] = {}
    for node in nodes:
        if node in first or any(source in found for source in node.all_input_nodes):
            found[node] = None
    return list(found)


def is_fixed(node: fx.Node) -> bool:
    """Whether the node may not change places with others of its kind."""
    if isinstance(node.target, torch._ops.OpOverload):
        return sends(node) or is_random(node) or node.target._schema.is_mutable
    return isinstance(node.target, HigherOrderOperator) or node.op == "call_module"


def is_start(node: fx.Node) -> bool:
    """Whether what it posts is waited for by another operator."""
    return op_name(node) in STARTS


def is_product(node: fx.Node) -> bool:
    name = op_name(node)
    return name in PRODUCTS or any(part in name for part in PARTS_OF_PRODUCTS)


def flops_of(node: fx.Node, ranks: int = 1) -> float:
    """2 a multiplication of a product. Of its whole values, where the passes noted how these are spread: on each of
    `ranks` with as many rows, the same number on all of them, whatever rows each has. Of a fused attention, and of the
    backward of a convolution, at least so many; of rows whose number is known only when the program runs, infinitely
    many."""
    name = op_name(node)
    operand = node.args[1 if name.startswith(("add", "badd")) else 0]
    forward = "conv" in name and "backward" not in name  # of a convolution
    summed = sizes_of(node.args[1])[1:] if forward else sizes_of(operand)[-1:]
    spread = any(x.meta.get(PLACEMENT) is not None for x in (node, operand))
    return 2 * numbers((*sizes_of(node), *summed)) / (ranks if spread else 1)


def sizes_of(node: fx.Node) -> list[Any]:
    """Of the whole value, whatever rows this rank has of it."""
    whole, placement = node.meta.get(WHOLE), node.meta.get(PLACEMENT)
    value = value_of(node) if whole is None else whole
    if isinstance(value, (tuple, list)):  # the backward of a convolution has None where no gradient is asked for
        value = next(one for one in value if one is not None)
    sizes = list(value.shape)
    if whole is None and placement is not None:
        sizes[placement.dim] = placement.size
    return sizes


def numbers(sizes: Sequence[Any]) -> float:
    """Their product at the length at hand; infinite where one is known only when the program runs."""
    unknown = any(isinstance(size, torch.SymInt) and size.node.hint is None for size in sizes)
    return inf if unknown else prod(map(at_hand, sizes))
