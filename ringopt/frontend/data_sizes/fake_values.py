"""The fake values of nodes in Dynamo's graph: which sizes are known, and which memory is whose."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import origin
from ringopt.torch_compat.dynamo import is_batchedtensor
from ringopt.torch_compat.fake_tensors import FakeTensor
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
    """Of a tensor; None of anything else, and where a transform such as vmap has wrapped it."""
    value = fake_value(node)
    return storage_key(value) if isinstance(value, Tensor) and not is_batchedtensor(value) else None


def made_like(node: fx.Node, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
    """A call, with its fake value, where the graph of `node` inserts, and as if `node` had stood there: of a function,
    or of the method that a string names."""
    values, named = fx.map_arg((args, kwargs), fake_value)
    called = getattr(values[0], target) if isinstance(target, str) else target
    fake = next(x for x in tree_leaves((values, named)) if isinstance(x, FakeTensor))
    with fake.fake_mode:
        value = called(*values[isinstance(target, str) :], **named)
    made = node.graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
    made.meta.update(origin(node), example_value=value)
    return made
