"""Operators that torch defines by others, taken apart.

    y = outer(a, b)   ->   y = mul(view(a, [3, 1]), b)

An operator that nothing here knows may consist of ones that are known. What it does is what torch itself does in
eager: its CompositeImplicitAutograd kernel, traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.rules import is_known
from ringopt.ir.nodes import is_tensor, op_name, tensor_args, value_of
from ringopt.ir.symbolic_sizes import is_open
from ringopt.sharding.sharder import Sharder
from ringopt.torch_compat.autograd import no_autocast
from ringopt.torch_compat.fake_tensors import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from ringopt.torch_compat.fx import make_fx
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import OpOverload, can_decompose
from ringopt.torch_compat.tracing import tracing


def parts_of(node: fx.Node, handled: frozenset[str]) -> fx.Graph | None:
    """A graph with a placeholder for each tensor that `node` reads; its operators have rules, or are among `handled`.
    None where the operator is known itself or none that torch defines by others, or one of these is not known either,
    writes, or is hidden from autograd."""
    target, operands = node.target, list(dict.fromkeys(tensor_args(node)))
    if not isinstance(target, OpOverload) or not can_decompose(target):
        return None
    if is_known(node) or op_name(node) in handled:
        return None  # what is known of it has an answer already
    values = [value_of(operand) for operand in operands]
    if not all(isinstance(value, FakeTensor) and not any(map(is_open, value.shape)) for value in values):
        return None

    def run(*given: torch.Tensor) -> Any:
        known = dict(zip(operands, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: known.get(arg, value_of(arg)))
        return target.decompose(*args, **kwargs)

    try:
        with tracing(None), values[0].fake_mode, torch.enable_grad(), no_autocast():
            given = [value.detach().requires_grad_(value.is_floating_point() or value.is_complex()) for value in values]
            traced = make_fx(run, tracing_mode="real", _allow_non_fake_inputs=True)(*given)
            same = gradient_of(run(*given)) == gradient_of(traced(*given))
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None  # it looks at numbers
    calls = [part for part in traced.graph.nodes if part.op not in ("placeholder", "output")]
    fine = all(part.target != target and (is_known(part) or op_name(part) in handled) for part in calls)
    return traced.graph if calls and fine and same else None


def gradient_of(made: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The backward of what was made: its functions, each with the places of those it hands on to. A kernel may keep a
    part of its work from autograd, which no trace shows."""
    order: dict[Any, int] = {}
    found: list[tuple[str, tuple[int, ...]]] = []

    def visit(function: Any) -> int:
        if function is None:
            return -1
        if function not in order:
            below = tuple(visit(after) for after, _ in function.next_functions)
            order[function] = len(order)
            found.append((function.name(), below))
        return order[function]

    for value in tree_leaves(made):
        found.append(("", (visit(value.grad_fn),)))
    return found


def in_parts(sharder: Sharder, node: fx.Node, handled: frozenset[str], spread: Callable[[fx.Node], bool]) -> bool:
    """An operator that torch defines by others, each of which is sharded by itself, by `spread`."""
    parts = parts_of(node, handled)
    users = list(node.users)
    if parts is None or (not is_tensor(node) and any(user.target is not operator.getitem for user in users)):
        return False
    made = dict(zip(parts.find_nodes(op="placeholder"), dict.fromkeys(tensor_args(node)), strict=True))
    for part in parts.nodes:
        if part.op == "call_function":
            with node.graph.inserting_before(node):
                made[part] = node.graph.node_copy(part, made.__getitem__)
            sharder.adopt(made[part], like=node)
            if not spread(made[part]):
                sharder.whole(made[part])
    found = fx.map_arg(parts.output_node().args[0], made.__getitem__)
    for user, value in [(node, found)] if is_tensor(node) else [(user, found[user.args[1]]) for user in users]:
        sharder.set(user, sharder.values[value], sharder.placements[value])
        sharder.climbers[user] = partial(sharder.sharded, value)
    return True
