"""What others do where ranks hold equally many rows of a sequence: an all-gather of keys and values with SDPA, and
torch's own ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

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
    """The only ring of torch that runs on a CPU: private, forward only; causal with its own balanced shards (zigzag).
    Its keys and values go round by "allgather" or by "alltoall"."""
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch_cp._cp_options.enable_load_balance = causal
        torch_cp.set_rotate_method(rotation)
        out: Tensor = torch_cp._templated_ring_attention(group, 2, op, q, k, v, is_causal=causal)[0]
        return out

    return run


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
