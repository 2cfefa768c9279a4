"""Where the rows stood that random numbers are drawn for."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.ir.nodes import op_name
from ringopt.sharding.by_position import order_of_rows


@pytest.mark.parametrize("how", [{}, {"stable": True}], ids=["any order of equals", "stable"])
def test_rows_that_were_sorted_stood_in_the_order_of_the_sort(how: dict[str, Any]) -> None:
    """Tokens by their experts."""

    def program(experts: Tensor, x: Tensor) -> Tensor:
        order = torch.sort(experts, **how)[1]
        return torch.rand_like(x[order])

    graph = make_fx(program, tracing_mode="fake")(torch.zeros(6, dtype=torch.long), torch.ones(6, 4)).graph
    (drawn,) = (node for node in graph.nodes if op_name(node) == "rand_like")
    order = order_of_rows(drawn)
    assert order is not None and order.target is operator.getitem and order.args[1] == 1
    assert op_name(order.args[0]) == "sort"
