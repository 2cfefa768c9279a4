"""torch's own ring attention, which the benchmarks measure."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention

from ringopt.torch_compat import sdpa

__all__ = ["templated_ring_attention"]


def templated_ring_attention(
    group: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, balanced: bool, rotation: str
) -> Tensor:
    """The only ring of torch that runs on a CPU, forward only. `balanced`: shards are laid out in a zigzag. Keys and
    values go round by `rotation`, "allgather" or "alltoall"."""
    _attention._cp_options.enable_load_balance = balanced
    _attention.set_rotate_method(rotation)
    out: Tensor = _attention._templated_ring_attention(group, 2, sdpa.flash_cpu, q, k, v, is_causal=causal)[0]
    return out
