"""Denoisers of diffusers, made tiny: `build(name, implementation, length)`, implementation "sdpa" or "eager"."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.zoo.inputs import BATCH, normal

HEADS = dict(num_attention_heads=4, attention_head_dim=16)
CAPTION, TEXT = 16, 32  # tokens of the caption, and their width

Built = tuple[nn.Module, dict[str, Any]]


def latent_side(length: int) -> int:
    """The side of a latent image with about `length` patches of two by two."""
    return 2 * max(4, math.isqrt(length))


def latents(side: int) -> Tensor:
    return normal(BATCH, 4, side, side)


def caption() -> Tensor:
    return normal(BATCH, CAPTION, TEXT)


STEPS, TIMES = torch.tensor([5, 9]), torch.tensor([0.5, 0.7])


def pixart(length: int) -> Built:
    from diffusers import PixArtTransformer2DModel

    side, mask = latent_side(length), torch.ones(BATCH, CAPTION)
    mask[1, 12:] = 0
    model = PixArtTransformer2DModel(
        **HEADS, in_channels=4, out_channels=8, num_layers=2, cross_attention_dim=64, sample_size=side, patch_size=2,
        caption_channels=TEXT, use_additional_conditions=False,
    )  # fmt: skip
    return model, dict(
        hidden_states=latents(side), encoder_hidden_states=caption(), encoder_attention_mask=mask, timestep=STEPS,
        added_cond_kwargs=dict(resolution=None, aspect_ratio=None),
    )  # fmt: skip


def flux(length: int) -> Built:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        **HEADS, patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, length, 16), encoder_hidden_states=caption(), timestep=TIMES,
        pooled_projections=normal(BATCH, TEXT), img_ids=torch.zeros(length, 3), txt_ids=torch.zeros(CAPTION, 3),
    )  # fmt: skip


def vae_mid(length: int) -> Built:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2, norm_num_groups=8,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    return model, dict(sample=normal(BATCH, 3, 32, 32))


def auraflow(length: int) -> Built:
    from diffusers import AuraFlowTransformer2DModel

    side = latent_side(length)
    model = AuraFlowTransformer2DModel(
        **HEADS, sample_size=side, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1,
        num_single_dit_layers=1, joint_attention_dim=TEXT, caption_projection_dim=64, pos_embed_max_size=256,
    )  # fmt: skip
    return model, dict(hidden_states=latents(side), encoder_hidden_states=caption(), timestep=TIMES)


def sana(length: int) -> Built:
    """Linear attention over the image, softmax attention over the caption."""
    from diffusers import SanaTransformer2DModel

    side = latent_side(length)
    model = SanaTransformer2DModel(
        **HEADS, in_channels=4, out_channels=4, num_layers=2, num_cross_attention_heads=4, cross_attention_head_dim=16,
        cross_attention_dim=64, caption_channels=TEXT, sample_size=side, patch_size=1,
    )  # fmt: skip
    return model, dict(hidden_states=latents(side), encoder_hidden_states=caption(), timestep=STEPS)


def wan(length: int) -> Built:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        **HEADS, patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=TEXT, freq_dim=32, ffn_dim=64,
        num_layers=2,
    )  # fmt: skip
    side = latent_side(length) // 2
    video, text = normal(1, 4, 2, side, side), normal(1, CAPTION, TEXT)
    return model, dict(hidden_states=video, encoder_hidden_states=text, timestep=torch.tensor([5]))


def prior(length: int) -> Built:
    from diffusers import PriorTransformer

    model = PriorTransformer(
        **HEADS, num_layers=2, embedding_dim=TEXT, num_embeddings=length, additional_embeddings=4
    )  # fmt: skip
    return model, dict(
        hidden_states=normal(BATCH, TEXT), proj_embedding=normal(BATCH, TEXT), timestep=STEPS,
        encoder_hidden_states=normal(BATCH, length, TEXT),
    )  # fmt: skip


ENTRIES: dict[str, Callable[[int], Built]] = {
    make.__name__: make for make in (pixart, flux, vae_mid, auraflow, sana, wan, prior)
}


def build(name: str, implementation: str, length: int) -> Built:
    torch.manual_seed(0)
    model, inputs = ENTRIES[name](length)
    if implementation == "eager":
        from diffusers.models.attention_processor import AttnProcessor

        model.set_attn_processor(AttnProcessor())
    return model, {**inputs, "return_dict": False}
