"""What nodes say of where they come from."""

from __future__ import annotations

import pytest
import torch.fx as fx

from ringopt.ir.nodes import module_path


@pytest.mark.parametrize("root", ["L['self']", "L['args'][0]", "L__self__"])
def test_a_module_has_one_name_wherever_dynamo_begins(root: str) -> None:
    """In the method of a module, or in a wrapper of it that takes any arguments."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"0": (root, object), "1": (f"{root}.model.layers.0.self_attn", object)}
    assert module_path(node) == "model.layers.0.self_attn"
