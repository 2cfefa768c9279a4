"""PyTorch's memory-efficient attention for NVIDIA GPUs (Rabe and Staats 2021, in the form of xFormers): the one with
masks and float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import HIDDEN, Kernel, TileInputs, WholeRows, hidden_rows
from ringopt.kernels.cuda import HALF, loadable, narrowed, refusal, repeated, sum_groups, tokens_first
from ringopt.torch_compat import sdpa

ROWS = 32  # rows of the lse come in multiples of it
KEYS = 16  # so do, in memory, the keys of a mask


class CudaEfficient(Kernel):
    """PyTorch's memory-efficient attention (`_scaled_dot_product_efficient_attention`, from xFormers): masks, values of
    any width, float32 and 16 bits."""

    name = "efficient"

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        capability = (8, 0) if dtype == torch.bfloat16 else (6, 0)
        return refusal(self.name, dtype, device, (torch.float32, *HALF), capability)

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (loadable(x) for x in (tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)))
        out, lse, *_ = sdpa.efficient(q, k, v, aligned(tile), True, 0.0, tile.causal, scale=tile.scale)
        out, lse = narrowed(out, tile.v), lse.narrow(2, 0, q.shape[2])
        if tile.mask is not None:
            hidden = hidden_rows(tile.mask, tile.causal)
            out, lse = out.masked_fill(hidden.unsqueeze(-1), 0.0), lse.masked_fill(hidden, HIDDEN)
        return out, lse.contiguous()

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)
        dout, wide_q, wide_k, wide_v, out = map(loadable, (rows.dout, q, k, v, rows.out))
        # Of `out` the kernel is told no row stride: in 16 bits it steps from row to row by heads x width elements.
        out = tokens_first(out)
        lse = F.pad(rows.lse, (0, -rows.lse.shape[2] % ROWS), value=torch.inf)  # as in the forward
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not done
        grads = sdpa.efficient_backward(
            *(dout, wide_q, wide_k, wide_v, aligned(tile), out, lse, state, state, 0.0),
            *([True, True, True, False], tile.causal),
            scale=tile.scale,
        )
        dq, dk, dv = (narrowed(grad, x) for grad, x in zip(grads, (q, k, v), strict=False))
        return dq, sum_groups(dk, tile.groups), sum_groups(dv, tile.groups)


def aligned(tile: TileInputs) -> Tensor | None:
    """The mask over all heads, each of its rows beginning at a multiple of KEYS elements."""
    mask, q, k = tile.mask, tile.q, tile.k
    if mask is None:
        return None
    rows = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % KEYS)).contiguous()
    return rows.narrow(-1, 0, mask.shape[-1]).expand(*q.shape[:3], k.shape[2])
