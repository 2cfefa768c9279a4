"""What nodes say of where they come from."""

from __future__ import annotations

import operator

import pytest
import torch.fx as fx

from ringopt.ir.nodes import descendants, module_path


@pytest.mark.parametrize("root", ["L['self']", "L['args'][0]", "L__self__"])
def test_a_module_has_one_name_wherever_dynamo_begins(root: str) -> None:
    """In the method of a module, or in a wrapper of it that takes any arguments."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"0": (root, object), "1": (f"{root}.model.layers.0.self_attn", object)}
    assert module_path(node) == "model.layers.0.self_attn"


def test_what_is_computed_from_a_node_and_something_else_descends_from_it() -> None:
    """As scores with a bias do from the product."""
    graph = fx.Graph()
    start, bias = graph.placeholder("start"), graph.placeholder("bias")
    alone = graph.call_function(operator.neg, (bias,))
    both = graph.call_function(operator.add, (start, alone))
    end = graph.call_function(operator.neg, (both,))
    assert descendants(start, end) == {start, both, end}
