"""Whether matrix products of float32 are computed in fewer digits on a device."""

from __future__ import annotations

import torch


def rounds_float32(device: str) -> bool:
    """Whether matrix products of float32 on devices of this type ("cuda", "cpu") are in TF32 or bfloat16: as
    `torch.backends.cuda.matmul.fp32_precision`, `torch.backends.fp32_precision`, `allow_tf32` or
    `torch.set_float32_matmul_precision` say. (`torch.get_float32_matmul_precision` fails once the first was set.)"""
    backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("tf32", "bf16")
