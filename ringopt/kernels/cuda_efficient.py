"""PyTorch's memory-efficient attention for NVIDIA GPUs (Rabe and Staats 2021, in the form of xFormers): the one with
masks and float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import HIDDEN, Kernel, hidden_rows
from ringopt.kernels.cuda import HALF, narrowed, refusal, repeated, summed, widened
from ringopt.torch_compat import sdpa

ROWS = 32  # rows of the lse come in multiples of it
KEYS = 16  # so do, in memory, the keys of a mask


class CudaEfficient(Kernel):
    name = "efficient"

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        capability = (8, 0) if dtype == torch.bfloat16 else (6, 0)
        return refusal(self.name, dtype, device, (torch.float32, *HALF), capability)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        wide = (widened(q), *(widened(repeated(x, groups)) for x in (k, v)))
        out, lse, *_ = sdpa.efficient(
            *wide, aligned(mask, q, k), True, 0.0, causal, scale=scale
        )
        out, lse = narrowed(out, v), lse.narrow(2, 0, q.shape[2])
        if mask is not None:
            hidden = hidden_rows(mask, causal)
            out, lse = out.masked_fill(hidden.unsqueeze(-1), 0.0), lse.masked_fill(hidden, HIDDEN)
        return out, lse.contiguous()

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        k, v = (repeated(x, groups) for x in (k, v))
        dout, wide_q, wide_k, wide_v, out = map(widened, (dout, q, k, v, out))
        lse = F.pad(lse, (0, -lse.shape[2] % ROWS), value=torch.inf)  # as the forward fills rows that are none
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not done
        grads = sdpa.efficient_backward(
            *(dout, wide_q, wide_k, wide_v, aligned(mask, q, k), out, lse, state, state, 0.0),
            *([True, True, True, False], causal),
            scale=scale,
        )
        dq, dk, dv = (narrowed(grad, x) for grad, x in zip(grads, (q, k, v), strict=False))
        return dq, summed(dk, groups), summed(dv, groups)


def aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask over all heads, each of its rows beginning at a multiple of KEYS elements."""
    if mask is None:
        return None
    rows = F.pad(mask.to(q.dtype), (0, -mask.shape[-1] % KEYS)).contiguous()
    return rows.narrow(-1, 0, mask.shape[-1]).expand(*q.shape[:3], k.shape[2])
