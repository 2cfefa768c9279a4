"""An order of nodes and outputs that follows from what is computed."""

from __future__ import annotations

import torch
import torch.fx as fx

from ringopt.ir.canonical_order import canonical_order

aten = torch.ops.aten


def outputs_in_order(first: str) -> list[str]:
    """relu(x) twice, and the sine of one of the two; the program has them begin with `first`."""
    graph, made = fx.Graph(), dict[str, fx.Node]()
    x = graph.placeholder("x")
    for name in (first, *({"alone", "read"} - {first})):
        made[name] = graph.create_node("call_function", aten.relu.default, (x,), name=name)
    sine = graph.create_node("call_function", aten.sin.default, (made["read"],), name="sine")
    outputs = [*made.values(), sine]
    graph.output(tuple(outputs))
    return [outputs[place].name for place in canonical_order(graph)[1]]


def test_outputs_that_are_computed_alike_differ_by_who_reads_them() -> None:
    assert outputs_in_order("alone") == outputs_in_order("read")
