"""Vision models of vit-pytorch, and the text model of local-attention by the same author."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from tests.zoo.inputs import ids, pixels, square

PLAIN = dict(patch_size=8, num_classes=8, dim=64, depth=2, heads=4, mlp_dim=128, dim_head=16)


@dataclass(frozen=True)
class Entry:
    """Module, class, sizes, the name of the input, and the side of the image (0: as many patches as tokens are asked
    for)."""

    module: str
    model: str
    sizes: dict[str, Any] = field(default_factory=dict)
    takes: str = "img"
    side: int = 0


ENTRIES = {
    "vit": Entry("vit", "ViT", PLAIN),
    "simple_flash": Entry("simple_flash_attn_vit", "SimpleViT", PLAIN),
    "relpos_proj": Entry("simple_vit_with_relative_proj_pos_bias", "SimpleViT", PLAIN),
    "deepvit": Entry("deepvit", "DeepViT", PLAIN),
    "cait": Entry("cait", "CaiT", dict(PLAIN, cls_depth=1)),
    "parallel": Entry("parallel_vit", "ViT", PLAIN),
    "rvt": Entry("rvt", "RvT", PLAIN),
    "cct": Entry(
        "cct", "CCT",
        dict(
            img_size=64, embedding_dim=64, n_conv_layers=2, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=8,
        ), "x", 64,
    ),
    "nest": Entry(
        "nest", "NesT",
        dict(image_size=64, patch_size=4, dim=32, heads=2, num_hierarchies=2, block_repeats=(1, 1), num_classes=8),
        "img", 64,
    ),
    "regionvit": Entry(
        "regionvit", "RegionViT",
        dict(dim=(16, 32, 32, 64), depth=(1, 1, 1, 1), window_size=4, num_classes=8), "x", 128,
    ),
    "t2t": Entry(
        "t2t", "T2TViT",
        dict(
            dim=64, image_size=64, depth=2, heads=4, mlp_dim=128, num_classes=8, t2t_layers=((7, 4), (3, 2), (3, 2)),
        ), "img", 64,
    ),
}  # fmt: skip


def build(name: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if name == "local_attention_tf":
        return local_attention(length)
    entry = ENTRIES[name]
    make = getattr(importlib.import_module(f"vit_pytorch.{entry.module}"), entry.model)
    side = entry.side or square(length)
    told = {} if entry.side else {"image_size": side}
    return make(**told, **entry.sizes), {entry.takes: pixels(side)}


def local_attention(length: int) -> tuple[nn.Module, dict[str, Any]]:
    from local_attention import LocalTransformer

    model = LocalTransformer(
        num_tokens=128, dim=64, depth=2, dim_head=16, heads=4, max_seq_len=512, causal=True, local_attn_window_size=16
    )
    return model, dict(x=ids(length))
