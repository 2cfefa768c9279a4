"""Compiling what the passes made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager

from ringopt.drivers.compile import in_order
from ringopt.ir.io_order import Order
from ringopt.ir.nodes import outputs_of


def turned(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """With the tensors among the inputs the other way round."""
    places = [place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    other = dict(zip(places, reversed(places), strict=True))
    order = Order(
        tuple(other.get(place, place) for place in range(len(inputs))), tuple(range(len(outputs_of(gm.graph))))
    )
    return in_order(gm, order, inputs, aot_eager)


def test_a_tensor_may_come_before_a_view_of_it() -> None:
    """At open lengths its sizes are still those that Dynamo knows from the view."""

    def program(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return rows.cos() * table[-rows.shape[1] :].sin()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend=turned)
    for rows in (16, 13, 21):
        table = torch.rand(rows, 4)
        given = table[None].expand(2, -1, -1), table
        torch.testing.assert_close(compiled(*given), program(*given))
