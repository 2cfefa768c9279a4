"""Sizes that Dynamo left open in its graph: a second length (or mark_dynamic, or dynamic=True) makes symbols of them.

What the passes decide about such a size becomes a guard of Dynamo's, as long as its backend has not returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.ir.nodes import readable_name
from ringopt.ir.symbolic_sizes import at_hand, is_open
from ringopt.torch_compat.symbolic_shapes import ShapeEnv


def sizes_of(value: Any) -> tuple[Any, ...]:
    """Of an input of the graph: those of a tensor, or the number that it is itself."""
    return (value,) if isinstance(value, torch.SymInt) else tuple(getattr(value, "shape", ()))


def open_sizes(gm: fx.GraphModule) -> dict[str, torch.SymInt]:
    """Of the inputs that are tensors, by a name for people; of those that are equal, the first."""
    found: dict[Any, tuple[str, torch.SymInt]] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(sizes_of(node.meta.get("example_value"))):
            if is_open(size):
                numbered = isinstance(node.meta["example_value"], torch.SymInt)
                name = readable_name(node.name) if numbered else f"size {dim} of {readable_name(node.name)}"
                if size.node.expr not in found or not numbered:
                    found[size.node.expr] = (name, size)
    return dict(found.values())


def shape_env_of(gm: fx.GraphModule) -> ShapeEnv | None:
    """What keeps the guards of the open sizes; None where there are none."""
    return next((size.node.shape_env for size in open_sizes(gm).values()), None)


def open_value(node: fx.Node, given: Any) -> Any:
    """What stands for an input while the graph is made: Dynamo's own value where a size of it is open."""
    value = node.meta.get("example_value", given)
    return value if any(isinstance(size, torch.SymInt) for size in sizes_of(value)) else given


def with_sizes_at_hand(inputs: Sequence[Any]) -> list[Any]:
    """`inputs`, of which those that are open sizes are numbers: what is made of them has no guard."""
    return [at_hand(x) if isinstance(x, torch.SymInt) else x for x in inputs]


def specialize(gm: fx.GraphModule) -> None:
    """Make Dynamo guard on every size of the inputs: another length compiles another graph.

    `int()` of a symbolic size records the guard. Without it a size that only our own ops read would go unguarded.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        for size in sizes_of(node.meta.get("example_value")):
            int(size)


class OpenSizes:
    """Which open sizes are fixed on the way through the passes, and where."""

    def __init__(self, gm: fx.GraphModule):
        self.sizes = open_sizes(gm)
        self.fixed: dict[str, str] = {}

    def passed(self, where: str) -> None:
        for name, size in self.sizes.items():
            if name not in self.fixed and not is_open(size):
                self.fixed[name] = where

    @property
    def notes(self) -> tuple[str, ...]:
        still = [name for name in self.sizes if name not in self.fixed]
        serves = [f"serves any {', any '.join(still)}, as far as its guards go"] if still else []
        fixed = [f"{name} is fixed at {int(self.sizes[name])} by {where}: another compiles another graph"
                 for name, where in self.fixed.items()]  # fmt: skip
        return (*serves, *fixed)
