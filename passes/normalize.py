"""A functional graph: no writes, no grad or autocast regions, no assertions about metadata.

    y.add_(1)                             ->   y1 = add(y, 1), later uses of y read y1
    y[:, 0].fill_(0)                      ->   y1 = select_scatter(y, full_like(select(y, 1, 0), 0), 1, 0)
    with no_grad: f(x)                    ->   f(detach(x))
    with autocast(bf16): linear(x, w)     ->   linear(to(x, bf16), to(w, bf16))
    dropout(x, 0.1, False)                ->   x
    type_as(x, y), x.view_as(y), x.T      ->   to(x, bf16), reshape(x, [2, 3]), permute(x, [1, 0])
    x[hidden] = 0                         ->   masked_fill(x, hidden, 0)

After: no mutable op but the final copy_ into inputs the program changes, so a value may be read anywhere. Moving a read
past a write, or a producer out of its no_grad region, is what makes hoisting lose or leak gradients.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.graph.autocast import Uncastable, explicit_casts
from ringopt.graph.custom_gradient import CustomGradient, custom_gradients
from ringopt.graph.functional import Functional, Unwritable
from ringopt.graph.nodes import argument, emit, named, op_name, requires_grad, shape_of, value_of
from ringopt.graph.refusal import Refusal
from ringopt.pipeline import Context, GraphRefused, Pass

aten = torch.ops.aten

DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range_for_size")


class Normalize(Pass):
    name = "normalize"

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        refuse_unknown_calls(gm.graph)
        explicit_detach(gm.graph)
        try:
            explicit_casts(gm)
            Functional(gm.graph).rewrite()
        except (Uncastable, Unwritable) as problem:
            raise GraphRefused(problem.refusal) from problem
        drop_assertions(gm.graph)
        drop_identities(gm.graph)
        name_shapes_and_types(gm.graph)
        fill_where_masked(gm.graph)
        for node in custom_gradients(gm.graph):
            # With the autocast region that is around the call around the backward too, as torch.compile has it
            # (torch._functorch.config.backward_pass_autocast).
            self.run(node.target.backward, context)


PYTHON_CALLS = ("getitem", "_set_grad_enabled", "_enter_autocast", "_exit_autocast")


def refuse_unknown_calls(graph: fx.Graph) -> None:
    for node in graph.nodes:
        plain = isinstance(node.target, (torch._ops.OpOverload, CustomGradient)) or op_name(node) in PYTHON_CALLS
        if node.op in ("call_module", "call_method") or (node.op == "call_function" and not plain):
            raise GraphRefused(Refusal(f"{node.target} is no ATen operator: what it does to rows is not known", node))


def explicit_detach(graph: fx.Graph) -> None:
    """Values enter a no_grad region through detach; the switches go."""
    carries, detached = requires_grad(graph), {}
    enabled = torch.is_grad_enabled()
    if not enabled and not any(op_name(node) == "_set_grad_enabled" and node.args[0] for node in graph.nodes):
        carries = dict.fromkeys(carries, False)  # inference: there is no gradient to stop
    for node in list(graph.nodes):
        if op_name(node) == "_set_grad_enabled":
            enabled = node.args[0]
            graph.erase_node(node)
        elif not enabled and node.op == "call_function":
            for arg in list(node.all_input_nodes):
                if not carries.get(arg):
                    continue
                if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                    raise GraphRefused(Refusal(f"{node.target} writes under no_grad to a value with a gradient", node))
                if arg not in detached:
                    with graph.inserting_after(arg):
                        detached[arg] = graph.call_function(aten.detach.default, (arg,))
                    detached[arg].meta = dict(arg.meta)
                node.replace_input_with(arg, detached[arg])
            carries[node] = False


def drop_assertions(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        if op_name(node) in DROPPED and not node.users:
            graph.erase_node(node)


def drop_identities(graph: fx.Graph) -> None:
    """Dropout that drops nothing; broadcast_tensors, which Python's losses put before an op that broadcasts anyway."""
    for node in list(graph.nodes):
        if op_name(node) == "getitem" and op_name(node.args[0]) == "broadcast_tensors":
            before = node.args[0].args[0][node.args[1]]
            if shape_of(before) == shape_of(node):
                node.replace_all_uses_with(before)
        if op_name(node) == "dropout" and (not argument(node, 2, "train") or argument(node, 1, "p") == 0.0):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def name_shapes_and_types(graph: fx.Graph) -> None:
    """Of another value that tells a view its shape, or a cast its type, nothing else is read: it need not be at hand.
    `x.T` is named as the permutation it is."""
    for node in graph.nodes:
        if len(node.args) != 2 - (op_name(node) == "numpy_T") or node.kwargs:
            continue
        first, found = node.args[0], value_of(node)
        if node.target in (aten.type_as.default, aten.to.other) and value_of(first).device == found.device:
            node.target, node.args = aten.to.dtype, (first, found.dtype)
        elif node.target in (aten.view_as.default, aten.reshape_as.default):
            node.target, node.args = aten.reshape.default, (first, list(shape_of(node)))
        elif node.target is aten.numpy_T.default:
            node.target, node.args = aten.permute.default, (first, list(reversed(range(found.dim()))))


def fill_where_masked(graph: fx.Graph) -> None:
    """One number written where a mask is true: no row need know which other rows are."""
    for node in graph.find_nodes(op="call_function", target=aten.index_put.default):
        base, (*before, mask), number = node.args[:3]
        if any(before) or value_of(mask).dtype != torch.bool or value_of(number).dim() or named(node, "accumulate"):
            continue
        with graph.inserting_before(node):
            for _ in range(len(shape_of(base)) - len(before) - len(shape_of(mask))):
                mask = emit(graph, aten.unsqueeze.default, (mask, -1), node)
            filled = emit(graph, aten.masked_fill.Tensor, (base, mask, number), node)
        if value_of(filled).stride() == value_of(node).stride():
            node.replace_all_uses_with(filled)
            graph.erase_node(node)
