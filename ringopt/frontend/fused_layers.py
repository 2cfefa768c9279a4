"""Operators that hold a whole layer, taken apart into ones the passes know.

Under no_grad, nn.TransformerEncoderLayer and nn.MultiheadAttention call one operator for the layer. It has no
gradient, so nothing is lost by writing out what it does; only the order of float additions inside may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.torch_compat.nn import ENCODER_LAYER, MULTI_HEAD_ATTENTION

PADDING_MASK = 1  # mask_type of a mask over [B, keys]; the others are over queries and keys


def encoder_layer(
    src: Tensor, width: int, heads: int, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    gelu: bool, norm_first: bool, eps: float, norm1: Tensor, norm1_bias: Tensor, norm2: Tensor, norm2_bias: Tensor,
    up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:  # fmt: skip
    """`torch._transformer_encoder_layer_fwd`; src [B, S, width]."""
    projections = Projections(heads, in_weight, in_bias, out_weight, out_bias)

    def attend(x: Tensor) -> Tensor:
        return projections.attend(x, x, x, mask, mask_type)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, up, up_bias)
        return F.linear(F.gelu(hidden) if gelu else F.relu(hidden), down, down_bias)

    if norm_first:
        src = src + attend(F.layer_norm(src, (width,), norm1, norm1_bias, eps))
        return src + feed_forward(F.layer_norm(src, (width,), norm2, norm2_bias, eps))
    src = F.layer_norm(src + attend(src), (width,), norm1, norm1_bias, eps)
    return F.layer_norm(src + feed_forward(src), (width,), norm2, norm2_bias, eps)


def attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, in_weight: Tensor, in_bias: Tensor,
    out_weight: Tensor, out_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True, average: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`torch._native_multi_head_attention`; query, key, value [B, S, width]."""
    projections = Projections(heads, in_weight, in_bias, out_weight, out_bias)
    return projections.attend(query, key, value, mask, mask_type), None


@dataclass(frozen=True)
class Projections:
    """Those of multi-head attention, as nn.MultiheadAttention holds them."""

    heads: int
    in_weight: Tensor
    in_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, mask_type: int | None) -> Tensor:
        """[B, S, width] of query, key, value [B, S, width]. A true mask hides the key."""
        projected = (
            F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip(
                (query, key, value), self.in_weight.chunk(3), self.in_bias.chunk(3), strict=True
            )
        )
        q, k, v = projected
        seen = None
        if mask is not None:
            hidden = mask.to(torch.bool)
            if mask_type == PADDING_MASK:
                hidden = hidden[:, None, None, :]
            seen = hidden.logical_not()
        out = F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2)
        return F.linear(out, self.out_weight, self.out_bias)


def is_whole_layer(target: Any, kwargs: dict[str, Any], args: tuple[Any, ...]) -> bool:
    """Whether DECOMPOSED has what the call asks for: attention weights are not given."""
    if target not in DECOMPOSED:
        return False
    wants_weights = target is MULTI_HEAD_ATTENTION and (
        args[10] if len(args) > 10 else kwargs.get("need_weights", True)
    )
    return not wants_weights


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    ENCODER_LAYER: encoder_layer,
    MULTI_HEAD_ATTENTION: attention,
}
