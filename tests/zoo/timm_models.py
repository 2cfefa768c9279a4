"""Vision models of timm, made tiny: `build(name, implementation, length)`, implementation "sdpa" or "eager"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from tests.zoo.inputs import pixels, square


@dataclass(frozen=True)
class Entry:
    """timm's name; the side of the image, or else the size of its patches: as many as tokens are asked for."""

    model: str
    sizes: dict[str, Any]
    side: int = 0
    patch: int = 0


def windows(**sizes: Any) -> dict[str, Any]:
    return dict(embed_dim=32, depths=(2, 2), num_heads=(2, 4), **sizes)


PLAIN = dict(patch_size=8, embed_dim=64, depth=2, num_heads=4)
STAGES = dict(depths=(1, 1, 1, 1))

ENTRIES = {
    "vit": Entry("vit_tiny_patch16_224", PLAIN, patch=8),
    "vit_map_pool": Entry("vit_base_patch16_siglip_224", PLAIN, patch=8),
    "deit_dist": Entry("deit_tiny_distilled_patch16_224", PLAIN, patch=8),
    "vit_relpos": Entry("vit_relpos_small_patch16_224", PLAIN, patch=8),
    "vit_srelpos": Entry("vit_srelpos_small_patch16_224", PLAIN, patch=8),
    "beit": Entry("beit_base_patch16_224", PLAIN, patch=8),
    "convit": Entry("convit_tiny", dict(PLAIN, local_up_to_layer=1), patch=8),
    "tnt": Entry("tnt_s_legacy_patch16_224", dict(embed_dim=64, depth=2, num_heads_outer=4), patch=16),
    "swin": Entry("swin_tiny_patch4_window7_224", windows(window_size=4), 64),
    "swinv2": Entry("swinv2_tiny_window8_256", windows(window_size=4), 64),
    "swinv2_cr": Entry("swinv2_cr_tiny_224", windows(window_size=(4, 4)), 64),
    "pvt_v2": Entry("pvt_v2_b0", STAGES, 64),
    "twins_pcpvt": Entry("twins_pcpvt_small", STAGES, 64),
    "twins_svt": Entry("twins_svt_small", dict(depths=(1, 1, 2, 1)), 224),
    "crossvit": Entry("crossvit_tiny_240", {}, 240),
    "nest": Entry("nest_tiny", {}, 64),
    "volo": Entry("volo_d1_224", {}, 64),
    "hiera": Entry("hiera_tiny_224", {}, 64),
    "efficientformer": Entry("efficientformer_l1", {}, 224),
    "mobilevit": Entry("mobilevit_xxs", {}, 128),
    "xcit": Entry("xcit_nano_12_p16_224", dict(depth=2), 64),
    "tiny_vit": Entry("tiny_vit_5m_224", {}, 64),
    "vitamin": Entry("vitamin_small_224", {}, 64),
    "halonet": Entry("halonet26t", {}, 256),
    "lambda_net": Entry("lambda_resnet26t", {}, 64),
    "poolformer": Entry("poolformer_s12", {}, 64),
}
SIZE_FROM_INPUT = ("efficientformer", "mobilevit", "halonet", "lambda_net", "poolformer", "pvt_v2", "tiny_vit")


def build(name: str, implementation: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    import timm

    entry = ENTRIES[name]
    side = entry.side or square(length, entry.patch)
    told = {} if name in SIZE_FROM_INPUT else {"img_size": side}
    torch.manual_seed(0)
    timm.layers.set_fused_attn(implementation == "sdpa")
    model = timm.create_model(entry.model, pretrained=False, num_classes=8, **entry.sizes, **told)
    return model, dict(x=pixels(side))
