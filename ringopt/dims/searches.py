"""Where numbers of tokens that are known only when the program runs come from: a mask in which tokens are searched for,
a mask that picks them, the sizes of pieces."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from ringopt.dims.op_families import SPLITS
from ringopt.ir.nodes import named, op_name, shape_of, value_of

ITEMS = ("item", "_local_scalar_dense")


def beginnings(node: fx.Node) -> Sequence[int]:
    """The dims of its first operand (of a mask) along which tokens may be."""
    if node.op != "call_function":
        return ()
    if is_search(node):
        return range(len(shape_of(node.args[0])))
    if op_name(node) == "index" and bools(node):
        return range(len(shape_of(bools(node)[0])))
    return (named(node, "dim") % len(shape_of(node.args[0])),) if op_name(node) in SPLITS and sized_by(node) else ()


def is_search(node: fx.Node) -> bool:
    """Whether it tells the places of what is not zero."""
    return op_name(node) in ("nonzero", "nonzero_numpy") or (op_name(node) == "where" and len(node.args) == 1)


def bools(node: fx.Node) -> list[fx.Node]:
    """The masks among the indices of an index or an index_put."""
    return [at for at in node.args[1] if at is not None and value_of(at).dtype in (torch.bool, torch.uint8)]


def sized_by(node: fx.Node) -> fx.Node | None:
    """The vector whose elements, all of them and in order, are the sizes of a split."""
    sizes = node.args[1] if len(node.args) > 1 else None
    if not isinstance(sizes, (list, tuple)) or not all(isinstance(s, fx.Node) and op_name(s) in ITEMS for s in sizes):
        return None
    found = [size.args[0] for size in sizes]
    if any(op_name(x) != "select" for x in found) or len({x.args[0] for x in found}) != 1:
        return None
    counts = found[0].args[0]
    inside = [tuple(x.args[1:]) for x in found] == [(0, i) for i in range(len(found))]
    return counts if inside and counts.op == "placeholder" else None
