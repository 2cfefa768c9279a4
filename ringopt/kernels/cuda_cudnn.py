"""cuDNN's fused attention through PyTorch."""

from __future__ import annotations

import os
import warnings
from functools import cache

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.cuda import HALF, capability_of, is_assumed, loadable, narrowed, refusal, repeated, sum_groups
from ringopt.torch_compat import sdpa
from ringopt.torch_compat.fake_tensors import FakeTensor

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
        k, v, _ = keys_and_values(tile)
        return attended(tile.q, k, v, tile)

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        k, v, copies = keys_and_values(tile)
        dq, dk, dv = pulled_back(tile.q, k, v, tile, rows)
        return dq, sum_groups(dk, copies), sum_groups(dv, copies)


def attended(q: Tensor, k: Tensor, v: Tensor, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """out and lse of `tile`, whose operands are these."""
    wide_q, wide_k, wide_v = map(unshared, (q, k, v))
    out, lse, *_ = sdpa.cudnn(wide_q, wide_k, wide_v, None, True, 0.0, tile.causal, False, scale=tile.scale)
    return narrowed(out, v), lse.view(q.shape[:3])


def pulled_back(q: Tensor, k: Tensor, v: Tensor, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of `tile`, whose operands are these."""
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
    return dq, dk, dv


# ---- fewer KV heads --------------------------------------------------------------------------------------------------
def keys_and_values(tile: TileInputs) -> tuple[Tensor, Tensor, int]:
    """K and V as cuDNN is given them, and how often it is given each head."""
    q, groups = tile.q, tile.groups
    if groups == 1 or is_assumed() or isinstance(q, FakeTensor) or takes_fewer_kv_heads(q.device, q.dtype):
        return tile.k, tile.v, 1
    return repeated(tile.k, groups), repeated(tile.v, groups), groups


@cache
def takes_fewer_kv_heads(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether fewer KV heads give the numbers of repeated ones here: tried once. Where they do not, a warning
    says why."""
    try:
        made = torch.Generator(device).manual_seed(0)
        q, k, v, dout = (
            torch.randn(2, heads, 128, 64, device=device, generator=made).to(dtype) for heads in (4, 2, 2, 4)
        )
        tile = TileInputs(q, k, v, 0.125, causal=True)
        found, right = attended(q, k, v, tile), attended(q, repeated(k, 2), repeated(v, 2), tile)
        rows = WholeRows(dout, right[0], right[1])
        dq, dk, dv = pulled_back(q, repeated(k, 2), repeated(v, 2), tile, rows)
        expected = (*right, dq, sum_groups(dk, 2), sum_groups(dv, 2))
        pairs = zip((*found, *pulled_back(q, k, v, tile, rows)), expected, strict=True)
        worked = all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05) for a, b in pairs)
        why = "their numbers are wrong"
    except Exception as error:
        worked, why = False, f"{type(error).__name__}: {error}"
    if not worked:
        warnings.warn(
            f"cuDNN takes no fewer KV heads than heads on {device}, and gets them repeated: {why}", stacklevel=2
        )
    return worked


# ---- operands as it reads them ---------------------------------------------------------------------------------------
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
