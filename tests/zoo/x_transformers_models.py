"""Variants of x-transformers: a token model with one thing changed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from tests.zoo.inputs import BATCH, ids, normal, right_padded

WIDTH, MEMORY = 64, 16

ENTRIES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "decoder_flash": dict(attn_flash=True),
    "dynamic_pos": dict(dynamic_pos_bias=True, dynamic_pos_bias_log_distance=False),
    "rotary_flash": dict(rotary_pos_emb=True, attn_flash=True),
    "gqa": dict(attn_kv_heads=2),
    "talking_heads": dict(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "sparse_topk": dict(attn_sparse_topk=8),
    "sigmoid": dict(attn_sigmoid=True),
    "residual_attn": dict(residual_attn=True),
    "encoder_mask": {},
    "cross": dict(cross_attend=True),
    "cross_flash": dict(cross_attend=True, attn_flash=True),
    "xl_shift": dict(shift_tokens=1),
}


def build(name: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    from x_transformers import Decoder, Encoder, TransformerWrapper

    torch.manual_seed(0)
    layers = Encoder if name == "encoder_mask" else Decoder
    stack = layers(dim=WIDTH, depth=2, heads=4, attn_dim_head=16, **ENTRIES[name])
    inputs: dict[str, Any] = dict(x=ids(length))
    if name == "encoder_mask":
        inputs["mask"] = right_padded(length).bool()
    if "cross_attend" in ENTRIES[name]:
        inputs["context"] = normal(BATCH, length + MEMORY, WIDTH)
    return TransformerWrapper(num_tokens=128, max_seq_len=512, attn_layers=stack), inputs
