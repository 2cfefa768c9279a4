"""cuDNN's fused attention through PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.cuda import HALF, narrowed, pad_head_dim, refusal, repeated, sum_groups
from ringopt.torch_compat import sdpa

WIDEST = 128  # both ways on all that it runs on; newer versions and GPUs know wider heads


class CudaCudnn(Kernel):
    """cuDNN's fused attention (`_scaled_dot_product_cudnn_attention`): 16 bits, compute capability 8.0, no masks, heads
    up to WIDEST."""

    name = "cudnn"
    masks = False

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if key_dim != value_dim:
            return Refusal(f"kernel cudnn needs values as wide as keys; found {value_dim} and {key_dim}")
        if key_dim > WIDEST:
            return Refusal(f"kernel cudnn has heads of up to {WIDEST}; found {key_dim}")
        reason = refusal(self.name, dtype, device, HALF, (8, 0))
        if reason is None and not torch.backends.cudnn.is_available():
            return Refusal("kernel cudnn needs cuDNN, and this torch has none")
        return reason

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = (pad_head_dim(x) for x in (tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)))
        out, lse, *_ = sdpa.cudnn(q, k, v, None, True, 0.0, tile.causal, False, scale=tile.scale)
        return narrowed(out, tile.v), lse.view(q.shape[:3])

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)
        dout, wide_q, wide_k, wide_v, out = map(pad_head_dim, (rows.dout, q, k, v, rows.out))
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not done
        grads = sdpa.cudnn_backward(
            *(dout, wide_q, wide_k, wide_v, out, rows.lse.unsqueeze(-1), state, state),
            *(None, None, None, q.shape[2], k.shape[2], 0.0, tile.causal),
            scale=tile.scale,
        )
        dq, dk, dv = (narrowed(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, sum_groups(dk, tile.groups), sum_groups(dv, tile.groups)
