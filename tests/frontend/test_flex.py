"""flex_attention, written out by its definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from ringopt.frontend.capture import capture
from tests.harness.capturing import ops
from tests.harness.translation import captured


@pytest.mark.parametrize("heads, copies", [(4, 0), (2, 1), (1, 1)])
def test_keys_are_repeated_only_where_several_heads_of_queries_share_them(heads: int, copies: int) -> None:
    """Of the four heads here. With as many heads of keys nothing is copied."""

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex_attention(q, k, v, enable_gqa=True)
        return out

    q, k, v = (torch.rand(1, n, 5, 8, dtype=torch.float64) for n in (4, heads, heads))
    gm, inputs = captured(program, q, k, v)
    flat = capture(gm, inputs).graph
    assert ops(flat).count("repeat_interleave") == copies
