"""What ranks hold chunk by chunk, read off a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.ir.nodes import outputs_of
from ringopt.ir.placement import Sharded
from ringopt.sharding import grains


def test_a_value_that_is_read_by_many_ways_is_looked_at_once() -> None:
    """There are 2**30 ways up to x."""

    def doubled(x: Tensor) -> Tensor:
        for _ in range(30):
            x = x + x
        return x

    calls: list[Any] = []

    def climbed(*given: Any) -> Iterator[Any]:
        calls.append(given)
        assert len(calls) <= 31
        return found(*given)

    found = grains.climbed
    (out,) = outputs_of(make_fx(doubled, tracing_mode="fake")(torch.ones(12, 4)).graph)
    with patch.object(grains, "climbed", climbed):
        assert not grains.inside_chunks(out, Sharded(0, 1, 12, 1), [(5, 2, "")])
    assert len(calls) == 31
