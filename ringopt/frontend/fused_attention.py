"""Kernels of attention that a program calls itself: for their log-sum-exp, or as files have them that were decomposed
for a GPU. Taken apart into what the passes know.

    out, lse = _scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
      ->   out = scaled_dot_product_attention(q, k, v, is_causal=True)
           lse = (q @ k.mT * scale + mask).detach().logsumexp(-1)       # of which torch has no gradient either
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.symbolic_sizes import same
from ringopt.torch_compat import sdpa
from ringopt.torch_compat.schema import schema_of

GIVES_LSE = {sdpa.flash_cpu: True, sdpa.flash: True, sdpa.efficient: False, sdpa.cudnn: False}  # [B, H, S], unpadded


def kernel_taken_apart(call: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The results of such a call with these operands, those that nobody reads None. None for other calls, and for what
    is more than attention: dropout, and results that only the kernel's own backward understands."""
    kernel = getattr(call.target, "overloadpacket", call.target)
    if kernel not in GIVES_LSE:
        return None
    schema = schema_of(kernel.default)
    given: dict[str, Any] = {each.name: each.default_value for each in schema.arguments}
    given |= dict(zip(given, args, strict=False)) | kwargs
    query, key, causal = given["query"], given["key"], given["is_causal"]
    mask = given.get("attn_mask", given.get("attn_bias"))
    alike = all(same(query.shape[dim], key.shape[dim]) for dim in ((1, 2) if causal else (1,)))
    read = {user.args[1] if user.target is operator.getitem else None for user in call.users}
    plain = not given["dropout_p"] and not given.get("return_debug_mask") and not (causal and mask is not None)
    if not alike or not plain or not read <= ({0, 1} if GIVES_LSE[kernel] else {0}):
        return None
    scale = given["scale"]
    out = F.scaled_dot_product_attention(query, key, given["value"], mask, is_causal=causal, scale=scale)
    lse = log_sum_exp(query.detach(), key.detach(), mask, causal, scale) if 1 in read else None
    return out, lse, *[None] * (len(schema.returns) - 2)


def log_sum_exp(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """[B, H, S] of the scores of query, key [B, H, S, D], in 32 bits at least."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.detach()
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.logsumexp(-1)
