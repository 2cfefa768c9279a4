"""What kernels of flash-attn compute, in torch, and the operators of its third version: names, schemas and the Python
around them as the library has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int, cu: Any) -> Tensor:
    """B S H D, as the kernel's documentation has it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    own = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    keys = torch.arange(k.shape[2])
    seen = (own >= keys) if causal else torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen & (keys >= own - left) if left >= 0 else seen
    seen = seen & (keys <= own + right) if right >= 0 else seen
    if cu is not None:
        place = torch.searchsorted(cu, keys.to(cu.dtype), right=True)
        seen = seen & (place[:, None] == place)
    out = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).contiguous()


def write(to: tuple[Tensor, ...], given: tuple[Tensor, ...], dout: Tensor, how: Any) -> None:
    """The gradients of `given`."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in given]
        found = torch.autograd.grad(attention(leaves[0], leaves[1], leaves[2], *how), leaves, dout)
    for x, grad in zip(to, found, strict=True):
        x.copy_(grad)


# ---- flash_attn_3 ----------------------------------------------------------------------------------------------------
EXTRA = (
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None,"
    " Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None,"
    " Tensor? v_descale=None"
)
FORWARD = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, Tensor? qv=None, Tensor? out_=None,"
    " Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None,"
    f" Tensor? seqused_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, {EXTRA},"
    " float? softmax_scale=None, bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1,"
    " SymInt attention_chunk=0, float softcap=0.0, bool rotary_interleaved=True, Tensor? scheduler_metadata=None,"
    " SymInt num_splits=1, bool? pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None, Tensor? sequed_q=None, Tensor? sequed_k=None, SymInt? max_seqlen_q=None,"
    " SymInt? max_seqlen_k=None, Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None,"
    " float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1,"
    " float softcap=0.0, bool deterministic=False, SymInt sm_margin=0) -> Tensor"
)
NAMES = [argument.split()[1].partition("=")[0] for argument in FORWARD[1 : FORWARD.index(")")].split(", ")]


def forward(*args: Any) -> Any:
    """Of a batch [B, S, H, D], or of packed sequences [S, H, D]. The dispatcher leaves defaults at the end out."""
    given = dict(zip(NAMES, args))  # noqa: B905
    q, k, v, cu, scale = (given.get(name) for name in ("q", "k", "v", "cu_seqlens_q", "softmax_scale"))
    how = given.get("causal", False), given.get("window_size_left", -1), given.get("window_size_right", -1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch = (q, k, v) if cu is None else (q[None], k[None], v[None])
    out = attention(*batch, scale, *how, cu)
    lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]) if cu is None else (q.shape[1], q.shape[0]))
    return out if cu is None else out[0], lse.float(), q.new_empty(0), q.new_empty(0)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any) -> Tensor:
    """Writes the gradients."""
    cu, gradients, how = rest[0], rest[6:9], rest[9:13]
    scale, causal, left, right = (*how, *(None, False, -1, -1)[len(how) :])
    given = (q, k, v) if cu is None else (q[None], k[None], v[None])
    to = gradients if cu is None else tuple(x[None] for x in gradients)
    write(to, given, dout if cu is None else dout[None], (scale, causal, left, right, cu))
    return torch.zeros_like(lse)


def third(namespace: str) -> torch.library.Library:
    """With the operators of flash_attn_3, which live as long as it."""
    made = torch.library.Library(namespace, "DEF")
    for name, schema, kernel in (("forward", FORWARD, forward), ("backward", BACKWARD, backward)):
        made.define(f"_flash_attn_{name}{schema}")
        made.impl(f"_flash_attn_{name}", kernel, "CPU")
        fake = forward if name == "forward" else lambda *given: torch.empty_like(given[5])
        torch.library.register_fake(f"{namespace}::_flash_attn_{name}", fake, lib=made)
    return made


class FlashAttnFunc(Function):
    """`ends`: cumulative lengths, or None of a batch."""

    @staticmethod
    def forward(
        ctx: Any, ops: Any, q: Tensor, k: Tensor, v: Tensor, ends: Any, causal: bool, window: Any, scale: Any
    ) -> Tensor:
        most = None if ends is None else 6
        ctx.ops, ctx.most = ops, most
        ctx.given = (q.shape[-1] ** -0.5 if scale is None else scale, causal, *window)
        out, lse, *_rest = ops._flash_attn_forward(
            q, k, v, None, None, None, None, ends, ends, None, None, None, most, most, *[None] * 9, ctx.given[0],
            causal=causal, window_size_left=window[0], window_size_right=window[1], attention_chunk=0, softcap=0.0,
            num_splits=1, pack_gqa=None, sm_margin=0,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, ends)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, *_: Any) -> Any:
        q, k, v, out, lse, ends = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        ctx.ops._flash_attn_backward(
            dout, q, k, v, out, lse, ends, ends, None, None, ctx.most, ctx.most, dq, dk, dv, *ctx.given, 0.0, False, 0
        )
        return None, dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], *[None] * 4
