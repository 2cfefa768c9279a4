"""Which inputs of a graph behind a graph break are worth cutting."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.sharding.behind_breaks import above_products


def test_what_products_read_is_above_them_and_nothing_else() -> None:
    def program(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), (y.cos() @ w).exp()

    graph = make_fx(program, tracing_mode="fake")(torch.ones(6, 4), torch.ones(6, 4), torch.ones(4, 3)).graph
    assert [node.name for node in graph.nodes if node in above_products(graph)] == ["y_1", "w_1", "cos", "mm"]
