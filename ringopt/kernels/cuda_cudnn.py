"""cuDNN's fused attention through PyTorch."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.cuda import HALF, capability_of, is_assumed, loadable, narrowed, refusal, repeated, sum_groups
from ringopt.torch_compat import sdpa

WIDEST = 128  # both ways on all that it runs on; newer versions and GPUs know wider heads
VERSION = 91501  # 9.15.1: older ones go out of bounds where a length is no multiple of 128 (pytorch issue 169849)
PREFERRED = ((9, 0), (10, 0), (10, 3))  # compute capabilities on which PyTorch itself takes it first


class CudaCudnn(Kernel):
    """cuDNN's fused attention (`_scaled_dot_product_cudnn_attention`): 16 bits, compute capability 8.0, no masks, heads
    up to WIDEST, more than one query and key."""

    name = "cudnn"
    masks = False

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if key_dim != value_dim:
            return Refusal(f"kernel cudnn needs values as wide as keys; found {value_dim} and {key_dim}")
        if key_dim > WIDEST:
            return Refusal(f"kernel cudnn has heads of up to {WIDEST}; found {key_dim}")
        reason = refusal(self.name, dtype, device, HALF, (8, 0))
        if reason is None and not is_assumed() and not torch.backends.cudnn.is_available():
            return Refusal("kernel cudnn needs cuDNN, and this torch has none")
        found = VERSION if is_assumed() else torch.backends.cudnn.version() or 0
        if reason is None and found < VERSION:
            return Refusal(f"kernel cudnn needs cuDNN {VERSION}, as cuDNN counts versions; found {found}")
        if reason is None and torch.are_deterministic_algorithms_enabled():
            return Refusal("kernel cudnn is not deterministic, and torch.use_deterministic_algorithms asks for that")
        return reason

    def preferred(self, device: torch.device) -> bool:
        """PyTorch takes it before flash attention on these, unless the user has switched it off or back."""
        deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
        on = torch.backends.cuda.cudnn_sdp_enabled() and not deprioritized
        return on and capability_of(device) in PREFERRED

    def takes(self, tile: TileInputs) -> bool:
        return super().takes(tile) and min(tile.q.shape[2], tile.k.shape[2]) > 1

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = map(unshared, (tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)))
        out, lse, *_ = sdpa.cudnn(q, k, v, None, True, 0.0, tile.causal, False, scale=tile.scale)
        return narrowed(out, tile.v), lse.view(q.shape[:3])

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tile.q, repeated(tile.k, tile.groups), repeated(tile.v, tile.groups)
        wide_q, wide_k, wide_v = map(unshared, (q, k, v))
        # PyTorch keeps what cuDNN has built by the strides of q, k and v alone: `out` and `dout` have those that the
        # forward gives `out`, whoever asks.
        dout, out = (laid_out(loadable(x), wide_q) for x in (rows.dout, rows.out))
        state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not done
        grads = sdpa.cudnn_backward(
            *(dout, wide_q, wide_k, wide_v, out, rows.lse.unsqueeze(-1), state, state),
            *(None, None, None, q.shape[2], k.shape[2], 0.0, tile.causal),
            scale=tile.scale,
        )
        dq, dk, dv = (narrowed(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, sum_groups(dk, tile.groups), sum_groups(dv, tile.groups)


def unshared(x: Tensor) -> Tensor:
    """`loadable`, and of no two elements at one place, as expanded tensors have them."""
    x = loadable(x)
    shared = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if shared else x


def laid_out(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `torch.empty_like(like)`, which has its sizes; those of sizes of 1 address nothing."""
    wanted = torch.empty_like(like)
    alike = all(a == b or n == 1 for a, b, n in zip(x.stride(), wanted.stride(), x.shape, strict=True))
    return x if alike else wanted.copy_(x)
