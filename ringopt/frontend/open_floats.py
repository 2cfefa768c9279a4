"""Floats that Dynamo leaves open: a number of the program that was another one at the second call (a weight that is
annealed, a temperature).

Dynamo hands such a float over as a tensor without dims, in float64, out of which its graph takes the number. Where only
sums and products are made of it, they are made of the tensor, and one graph serves all numbers:

    scale = l_scale_.item()
    y = x * scale                    y = x * l_scale_.to(x.dtype)

Elsewhere (an argument of an operator, a condition) the number is fixed: another one compiles another graph.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.fx as fx

from ringopt.torch_compat.dynamo import TensorifyScalarRestartAnalysis, TensorifyState
from ringopt.torch_compat.symbolic_shapes import float_symbol

OF_NUMBERS = (operator.add, operator.sub, operator.mul, operator.neg)
OF_TENSORS = (operator.add, operator.sub, operator.mul, operator.truediv, torch.add, torch.sub, torch.mul, torch.div)
METHODS = ("add", "sub", "mul", "div")
IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, "add_", "sub_", "mul_", "div_")

# An operator of these computes with a number in float32, and rounds what comes out.
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

Symbols = dict[fx.Node, frozenset[str]]

# Of graphs that were rewritten, the floats that are open: a graph that is compiled anew has none to be found.
_opened: WeakKeyDictionary[fx.GraphModule, frozenset[str]] = WeakKeyDictionary()


def floats_as_tensors(gm: fx.GraphModule) -> None:
    """Rewrites the sums and products with open floats in Dynamo's graph. Has Dynamo start again, with those floats
    fixed, where one is used otherwise."""
    numbers: Symbols = {}
    mixed: dict[fx.Node, torch.dtype] = {}
    fixed = frozenset[str]()
    for node in gm.graph.nodes:
        behind = frozenset[str]().union(*(numbers.get(operand, ()) for operand in node.all_input_nodes))
        if is_taken_out(node):
            numbers[node] = frozenset({str(float_symbol(node.meta["example_value"]))})
            fixed |= numbers[node] if is_known(node) else frozenset()
        elif behind and is_of_numbers(node, numbers):
            numbers[node] = behind
        elif behind and (dtype := dtype_of_tensor(node, numbers)) is not None:
            mixed[node] = dtype
        else:
            fixed |= behind
    if fixed:
        for name in fixed:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis
    for node, dtype in mixed.items():
        _write_with_tensors(node, dtype, numbers)
    for node in numbers:
        if is_taken_out(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    if numbers:
        _opened[gm] = frozenset[str]().union(*numbers.values())
        gm.recompile()


@contextmanager
def left_open(gm: fx.GraphModule) -> Iterator[None]:
    """Around what compiles `gm`, rewritten: AOTAutograd has Dynamo fix the floats that it has not itself rewritten, but
    for those that it takes to be fixed already. What it asks to be fixed stays asked, for Dynamo starts again; once all
    is compiled nothing does, or floats of the same name would be fixed in every program to come."""
    opened = _opened.get(gm, frozenset()) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= opened
    try:
        yield
    finally:
        TensorifyState.force_specializations -= opened
    TensorifyState.clear()


def is_taken_out(node: fx.Node) -> bool:
    """Whether it is an open float of the program; what the program itself takes out of a tensor has no such symbol."""
    value = node.meta.get("example_value")
    if node.op != "call_method" or node.target != "item" or not isinstance(value, torch.SymFloat):
        return False
    return float_symbol(value) is not None


def is_known(node: fx.Node) -> bool:
    """Whether a guard has fixed the number meanwhile."""
    return not node.meta["example_value"].node.expr.is_Symbol


def is_of_numbers(node: fx.Node, numbers: Symbols) -> bool:
    """Whether its operands are open floats, and numbers that a tensor takes: Python's ints may be larger."""
    plain = all(
        x in numbers if isinstance(x, fx.Node) else isinstance(x, (int, float)) and not _is_large(x) for x in node.args
    )
    return node.op == "call_function" and node.target in OF_NUMBERS and plain


def _is_large(x: int | float) -> bool:
    return isinstance(x, int) and abs(x) >= 2**63


def dtype_of_tensor(node: fx.Node, numbers: Symbols) -> torch.dtype | None:
    """Of the tensor, and of the result, where a node is a sum or product of a tensor and an open float; else None."""
    known = {"call_function": (*OF_TENSORS, *IN_PLACE), "call_method": (*METHODS, *IN_PLACE)}
    if node.target not in known.get(node.op, ()) or node.kwargs or len(node.args) != 2:
        return None
    tensors = [x for x in node.args if x not in numbers]
    value = tensors[0].meta.get("example_value") if len(tensors) == 1 and isinstance(tensors[0], fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return None
    writes = node.target in IN_PLACE
    return None if writes and (value.dtype in WIDE or node.args[0] is not tensors[0]) else value.dtype


def _write_with_tensors(node: fx.Node, dtype: torch.dtype, numbers: Symbols) -> None:
    wide = WIDE.get(dtype, dtype)

    def cast(x: Any, to: torch.dtype) -> fx.Node:
        made = node.graph.call_method("to", (x, to))
        made.meta = {name: entry for name, entry in node.meta.items() if name != "example_value"}
        return made

    with node.graph.inserting_before(node):
        node.args = tuple(cast(x, wide) if x in numbers or wide != dtype else x for x in node.args)
    if wide != dtype:
        with node.graph.inserting_after(node):
            rounded = cast(node, dtype)
        node.replace_all_uses_with(rounded, lambda user: user is not rounded)
