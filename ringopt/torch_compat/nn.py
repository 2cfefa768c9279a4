"""Private functions behind torch.nn: those that Dynamo meets in its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules import transformer

__all__ = ["CANONICAL_MASK", "DETECT_IS_CAUSAL_MASK", "ENCODER_LAYER", "MULTI_HEAD_ATTENTION"]

# (mask, is_causal=None, size=None) -> bool: a hint, for which nn.TransformerEncoder looks at the numbers of a mask.
DETECT_IS_CAUSAL_MASK: Callable[..., Any] = transformer._detect_is_causal_mask

# (mask, mask_name, other_type, other_name, target_type, check_other=True): a mask as numbers to be added.
CANONICAL_MASK: Callable[..., Any] = F._canonical_mask

# The fused layers that nn.TransformerEncoderLayer and nn.MultiheadAttention call where no gradient is wanted.
ENCODER_LAYER: Callable[..., Any] = torch._transformer_encoder_layer_fwd
MULTI_HEAD_ATTENTION: Callable[..., Any] = torch._native_multi_head_attention
