"""What others do where ranks hold equally many rows of a sequence: an all-gather of keys and values with SDPA, and
torch's own ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ringopt.torch_compat.torch_ring import templated_ring_attention

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_gather(mask: Tensor | None, at_once: bool) -> Run:
    """Contiguous shards: all keys and values to every rank, and one attention with `mask` for its own queries. Keys and
    values are one message where they go `at_once`, which is faster; one after the other they hold less."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if at_once:
            keys, values = gathered(torch.stack([k, v])).unbind()
        else:
            keys, values = gathered(k), gathered(v)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    return run


def torch_ring(group: Any, causal: bool, rotation: str) -> Run:
    """Private, forward only; causal with its own balanced shards (zigzag). Its keys and values go round by "allgather"
    or by "alltoall"."""
    return lambda q, k, v: templated_ring_attention(group, q, k, v, causal, balanced=causal, rotation=rotation)


def gathered(x: Tensor) -> Tensor:
    """Contiguous shards [..., S_local, D] of all ranks, along the rows."""
    whole: Tensor = AllGather.apply(x)  # type: ignore[no-untyped-call]
    return whole


class AllGather(torch.autograd.Function):
    """Its gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), -2)[dist.get_rank()]
