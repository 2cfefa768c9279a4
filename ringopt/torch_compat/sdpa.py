"""Kernels of attention that also give the log-sum-exp, and their backwards: what ringopt/kernels adapts.

Relied on are the order and the meaning of arguments and results as in native_functions.yaml; the adapters say what each
kernel asks of its operands.
"""

from __future__ import annotations

import torch

__all__ = [
    "cudnn",
    "cudnn_backward",
    "efficient",
    "efficient_backward",
    "flash",
    "flash_backward",
    "flash_band",
    "flash_band_backward",
    "flash_cpu",
    "flash_cpu_backward",
]

aten = torch.ops.aten

# (q, k, v, dropout_p, is_causal, *, attn_mask, scale) -> (out, lse); its backward takes (dout, q, k, v, out, lse,
# dropout_p, is_causal, *, attn_mask, scale).
flash_cpu = aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward

# (q, k, v, dropout_p, is_causal, return_debug_mask, *, scale) -> (out, lse, ...).
flash = aten._scaled_dot_product_flash_attention
flash_backward = aten._scaled_dot_product_flash_attention_backward

# The same kernel one level lower, tokens before heads: (q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
# is_causal, return_debug_mask, *, scale, window_size_left, window_size_right) -> (out, lse, ...). Query i sees the keys
# from i + Sk - Sq - left to i + Sk - Sq + right; a size below 0 is none.
flash_band = aten._flash_attention_forward
flash_band_backward = aten._flash_attention_backward

# (q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale) -> (out, lse, ...).
efficient = aten._scaled_dot_product_efficient_attention
efficient_backward = aten._scaled_dot_product_efficient_attention_backward

# (q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, *, scale) -> (out, lse, ...).
cudnn = aten._scaled_dot_product_cudnn_attention
cudnn_backward = aten._scaled_dot_product_cudnn_attention_backward
