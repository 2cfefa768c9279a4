"""torch's own ring attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringopt.torch_compat.torch_ring import templated_ring_attention


def far(rotation: str) -> float:
    """From SDPA over the whole sequence, of which each rank has its half."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    rank = dist.get_rank()
    mine = (x.chunk(2, 2)[rank].contiguous() for x in (q, k, v))
    out = templated_ring_attention(dist.group.WORLD, *mine, causal=False, balanced=False, rotation=rotation)
    return float((out - F.scaled_dot_product_attention(q, k, v).chunk(2, 2)[rank]).abs().max())


def test_keys_go_round_either_way(ranks: Callable[..., list[Any]]) -> None:
    assert max(ranks(2, far, "allgather") + ranks(2, far, "alltoall")) < 1e-5
