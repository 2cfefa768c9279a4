"""The attention modules of torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.zoo.inputs import BATCH, normal, right_padded

WIDTH, HEADS = 64, 4
MEMORY = 16  # how much longer the other sequence is

Built = tuple[nn.Module, dict[str, Any]]


class TwoLayers(nn.Module):
    """nn.MultiheadAttention twice, with residuals; over `context` where it is given."""

    def __init__(self, causal: bool = False, need_weights: bool = False, **options: Any):
        super().__init__()
        layers = [nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True, **options) for _ in range(2)]
        self.layers, self.norms = nn.ModuleList(layers), nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.causal, self.need_weights = causal, need_weights

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        hidden = causal_mask(x.shape[1]).to(x) if self.causal else None
        for attention, norm in zip(self.layers, self.norms, strict=True):
            other = x if context is None else context
            y, _ = attention(
                x, other, other, key_padding_mask=None if mask is None else mask == 0, need_weights=self.need_weights,
                attn_mask=hidden, is_causal=self.causal,
            )  # fmt: skip
            x = norm(x + y)
        return x


def causal_mask(length: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(length)


def tokens(length: int) -> Tensor:
    return normal(BATCH, length, WIDTH)


def nn_mha_weights(length: int) -> Built:
    return TwoLayers(need_weights=True), dict(x=tokens(length))


def nn_mha_causal(length: int) -> Built:
    return TwoLayers(causal=True), dict(x=tokens(length))


def nn_mha_padding(length: int) -> Built:
    return TwoLayers(), dict(x=tokens(length), mask=right_padded(length))


def nn_mha_cross(length: int) -> Built:
    return TwoLayers(), dict(x=tokens(length), context=tokens(length + MEMORY))


def nn_mha_bias_kv_zero(length: int) -> Built:
    return TwoLayers(add_bias_kv=True, add_zero_attn=True), dict(x=tokens(length))


def nn_encoder_seqfirst(length: int) -> Built:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), dict(src=normal(length, BATCH, WIDTH))


def nn_decoder(length: int) -> Built:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True), 2)
    mask = dict(tgt_mask=causal_mask(length), tgt_is_causal=True)
    return decoder, dict(tgt=tokens(length), memory=tokens(length + MEMORY), **mask)


def nn_transformer(length: int) -> Built:
    model = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, batch_first=True)
    return model, dict(src=tokens(length + MEMORY), tgt=tokens(length), tgt_mask=causal_mask(length))


ENTRIES: dict[str, Callable[[int], Built]] = {
    make.__name__: make
    for make in (
        nn_mha_weights, nn_mha_causal, nn_mha_padding, nn_mha_cross, nn_mha_bias_kv_zero, nn_encoder_seqfirst,
        nn_decoder, nn_transformer,
    )
}  # fmt: skip


def build(name: str, length: int) -> Built:
    torch.manual_seed(0)
    return ENTRIES[name](length)
