"""Which fields the JSON of a program must have: those without a default in torch's schema."""

from __future__ import annotations

from typing import Any

import pytest

from ringopt.frontend.pt2.schema import Odd, of_type
from ringopt.torch_compat.export import schema


def test_a_field_with_a_default_may_be_left_out() -> None:
    """torch fills it in: `index` is the one field of a device that has a default."""
    of_type(schema.Device)({"type": "cuda", "index": 1})
    of_type(schema.Device)({"type": "cuda"})


@pytest.mark.parametrize("kind, said", [("GraphModule", "graph"), ("Device", "type"), ("SymExpr", "expr_str")])
def test_a_field_without_a_default_may_not(kind: str, said: str) -> None:
    """torch would fail on it halfway through the file, with an error of its own."""
    with pytest.raises(Odd, match=f"^a {kind} without {said}$"):
        of_type(vars(schema)[kind])({})


def test_a_field_that_is_made_by_a_function_may_be_left_out() -> None:
    """`custom_obj_values` and `sym_float_values` of a graph are new, empty dictionaries then."""
    graph: dict[str, Any] = {"inputs": [], "outputs": [], "nodes": []}
    of_type(schema.Graph)({**graph, "tensor_values": {}, "sym_int_values": {}, "sym_bool_values": {}})
