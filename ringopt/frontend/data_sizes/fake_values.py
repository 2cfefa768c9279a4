"""The fake values of nodes in Dynamo's graph: which sizes are known, and which memory is whose."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.symbolic_shapes import asserted_size, free_unbacked_symbols
from ringopt.torch_compat.tensors import storage_key

OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool)


def fake_value(node: fx.Node) -> Any:
    """The fake value in Dynamo's graph."""
    return node.meta.get("example_value")


def is_unknown(value: Any) -> bool:
    """Whether a size, or a number, is known only when the program runs."""
    return any(is_open(leaf) and free_unbacked_symbols(leaf) for leaf in tree_leaves(value))


def is_open(leaf: Any) -> bool:
    """Whether a number is a symbol, or a tensor may have one in its sizes or strides."""
    if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
        return True
    numbers = (*leaf.shape, *leaf.stride(), leaf.storage_offset()) if isinstance(leaf, Tensor) else (leaf,)
    return any(isinstance(number, OPEN) for number in numbers)


def known_size(size: Any) -> int | None:
    """A size, None where it is not known and follows from no other."""
    return asserted_size(size) if is_unknown(size) else int(size)


def is_picked(node: fx.Node) -> bool:
    """Whether it is a tensor (or several) of a size that is not known."""
    leaves = tree_leaves(fake_value(node))
    return any(isinstance(x, Tensor) and any(known_size(size) is None for size in x.shape) for x in leaves)


def is_unknown_number(node: fx.Node) -> bool:
    """Whether it is a number that is not known."""
    return isinstance(fake_value(node), OPEN) and is_unknown(fake_value(node))


def memory(node: fx.Node) -> Any:
    """Of a tensor; None of anything else."""
    value = fake_value(node)
    return storage_key(value) if isinstance(value, Tensor) else None
