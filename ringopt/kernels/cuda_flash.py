"""PyTorch's flash attention for NVIDIA GPUs (Dao, FlashAttention-2, 2023).

These are the operators that `torch.nn.attention.activate_flash_attention_impl("FA3")` (or "FA4") replaces, so that a
later version is used here too once it is activated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.cuda import HALF, capability_of, loadable, narrowed, refusal
from ringopt.torch_compat import sdpa

WIDEST = 256
# Compute capabilities, each from and to, whose shared memory is too small for the backward of heads in a range.
SMALL, NO_BACKWARD = (((8, 6), (8, 9)), ((12, 0), (12, 1))), (192, 224)


class CudaFlash(Kernel):
    """FlashAttention-2 (Dao 2023) as PyTorch has it (`_scaled_dot_product_flash_attention`): 16 bits, compute
    capability 8.0, no masks, heads up to WIDEST."""

    name = "flash"
    masks = False

    @property
    def bands(self) -> bool:
        """Windows are arguments of this version; what another makes of them is not known here."""
        return implementation() == "FA2"

    def takes(self, tile: TileInputs) -> bool:
        return super().takes(tile) and (tile.band is None or counts(tile))

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        if key_dim != value_dim:
            return Refusal(f"kernel flash needs values as wide as keys; found {value_dim} and {key_dim}")
        if key_dim > WIDEST:
            return Refusal(f"kernel flash has heads of up to {WIDEST}; found {key_dim}")
        reason = refusal(self.name, dtype, device, HALF, (8, 0))
        if reason is None and NO_BACKWARD[0] < key_dim <= NO_BACKWARD[1]:
            found = capability_of(device)
            if any(first <= found <= last for first, last in SMALL):
                major, minor = found
                return Refusal(
                    f"kernel flash has no backward for heads wider than {NO_BACKWARD[0]} and up to {NO_BACKWARD[1]} on "
                    f"compute capability {major}.{minor}; found {key_dim}"
                )
        return reason

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        q, k, v = map(loadable, (tile.q, tile.k, tile.v))
        if tile.band is None:
            out, lse, *_ = sdpa.flash(q, k, v, 0.0, tile.causal, False, scale=tile.scale)
            return narrowed(out, tile.v), lse
        left, right = window_of(tile)
        out, lse, *_ = sdpa.flash_band(
            *(x.transpose(1, 2) for x in (q, k, v)),
            *(None, None, q.shape[2], k.shape[2], 0.0, False, False),
            scale=tile.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return narrowed(out.transpose(1, 2), tile.v), lse

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tile.q, tile.k, tile.v
        dout, wide_q, wide_k, wide_v, out = map(loadable, (rows.dout, q, k, v, rows.out))
        # No dropout, so the state of its generator is not read; no packed sequences, so there are no offsets.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        rest = (None, None, q.shape[2], k.shape[2], 0.0, tile.causal, state, unused)
        operands = (dout, wide_q, wide_k, wide_v, out)
        if tile.band is None:
            grads = sdpa.flash_backward(*operands, rows.lse, *rest, scale=tile.scale)
        else:
            left, right = window_of(tile)
            turned = sdpa.flash_band_backward(
                *(x.transpose(1, 2) for x in operands),
                *(rows.lse, *rest),
                scale=tile.scale,
                window_size_left=left,
                window_size_right=right,
            )
            grads = tuple(grad.transpose(1, 2) for grad in turned)
        dq, dk, dv = (narrowed(grad, x) for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


def window_of(tile: TileInputs) -> tuple[int, int]:
    """The band as the kernel counts it: left and right of the diagonal that ends at the last query and the last key."""
    assert tile.band is not None
    low, high = tile.band
    diagonal = tile.k.shape[2] - tile.q.shape[2]
    return diagonal - low, high - 1 - diagonal


def counts(tile: TileInputs) -> bool:
    """Whether the kernel sees that window: one below 0 it takes for none, one of more than all keys for one of all."""
    left, right = window_of(tile)
    queries, keys = tile.q.shape[2], tile.k.shape[2]
    return left >= 0 and right >= 0 and (right < keys or queries <= keys)


def implementation() -> str:
    """Which flash attention the operators are at the moment: "FA2", unless another was activated."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    return current() or "FA2"
