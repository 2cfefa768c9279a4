"""PyTorch's flash attention for the CPU: blocked, never holds the scores of a tile."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows, accumulator, hidden_rows
from ringopt.torch_compat import sdpa

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class CpuFlash(Kernel):
    """PyTorch's flash attention on the CPU (`_scaled_dot_product_flash_attention_for_cpu`): masks, grouped heads in the
    forward only, values as wide as keys."""

    name = "flash_cpu"

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if device.type != "cpu":
            return Refusal(f"kernel flash_cpu runs on the CPU, and the tensors are on {device.type}")
        if dtype not in DTYPES:
            return Refusal(f"kernel flash_cpu has no {dtype}; it has {', '.join(map(str, DTYPES))}")
        if key_dim != value_dim:
            return Refusal(f"kernel flash_cpu needs values as wide as keys; found {value_dim} and {key_dim}")
        return None

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = map(readable, (tile.q, tile.k, tile.v))
        mask = tile.mask.to(q.dtype) if tile.mask is not None else None
        out, lse = sdpa.flash_cpu(q, k, v, 0.0, tile.causal, attn_mask=mask, scale=tile.scale)
        if mask is not None:
            # The kernel says 0.0 for a row that sees nothing, and a merge would take that for the weight exp(0).
            lse = lse.masked_fill(hidden_rows(mask, tile.causal), HIDDEN)
        return out, lse

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        k, v, kv_heads, groups = tile.k, tile.v, tile.k.shape[1], tile.groups
        if groups > 1:  # the forward knows grouped heads, the backward does not
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        dout, q, k, v, out = map(readable, (rows.dout, tile.q, k, v, rows.out))
        mask = tile.mask.to(q.dtype) if tile.mask is not None else None
        dq, dk, dv = sdpa.flash_cpu_backward(
            dout, q, k, v, out, rows.lse, 0.0, tile.causal, attn_mask=mask, scale=tile.scale
        )
        if groups > 1:
            wide = accumulator(q.dtype)
            dk, dv = (x.unflatten(1, (kv_heads, groups)).sum(2, dtype=wide) for x in (dk, dv))
        return dq, dk, dv


def readable(x: Tensor) -> Tensor:
    """The kernel takes the last dim for dense without looking: other strides give wrong numbers, and no error."""
    return x if x.stride(-1) == 1 else x.contiguous()
