"""Operands of a scan that no gradient comes to: a parameter has none then, as in the program, and no zeros.

    y = scan([S0], [x], [w], body)      body(S, x, w) = (S * w + x, S.detach() * x)
        ->                                                             # nobody reads the last S
    y = scan([detach(S0)], [x], [detach(w)], body)
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from ringopt.ir.nodes import value_of
from ringopt.scans.call import ScanCall, is_scan

DETACH = torch.ops.aten.detach.default


def detach_what_no_gradient_comes_to(graph: fx.Graph) -> None:
    """In place, of scans whose body stops a gradient."""
    for node in filter(is_scan, list(graph.nodes)):
        call = ScanCall.of(node)
        if any(inner.target is DETACH for inner in call.body.module.graph.nodes):
            operands, places = [*call.init, *call.xs, *call.consts], places_reached(node)
            reached = {operands[place] for place in places}
            for operand in dict.fromkeys(operands):
                if operand not in reached and operand.target is not DETACH and value_of(operand).is_floating_point():
                    detached(graph, node, operand)


def places_reached(node: fx.Node) -> set[int]:
    """Places among (init, xs, consts) to which a gradient of what is read comes."""
    body = ScanCall.of(node).body
    inputs, outputs = body.inputs, body.outputs
    read = [user.args[1] for user in node.users if user.target is operator.getitem and user.users]
    stack, seen = [outputs[place] for place in read], set[fx.Node]()
    while stack:
        inner = stack.pop()
        if inner in seen or inner.target is DETACH:
            continue
        seen.add(inner)
        stack += inner.all_input_nodes
        if inner in inputs[: body.carries]:  # it is what the step before made
            stack.append(outputs[inputs.index(inner)])
    return {place for place, inner in enumerate(inputs) if inner in seen}


def detached(graph: fx.Graph, node: fx.Node, operand: fx.Node) -> None:
    """`node` reads `operand` without a gradient."""
    with graph.inserting_before(node):
        made = graph.call_function(DETACH, (operand,))
    made.meta = {**operand.meta, "val": value_of(operand).detach()}
    node.replace_input_with(operand, made)
