"""What the models of transformers are made tiny with: `tiny` configurations, and the INPUTS they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo.inputs import BATCH, ids, normal, pixels, right_padded

WINDOW = 16
MEMORY = 16  # how much longer the encoder's input is than the decoder's

# What a size is called differs from family to family; a configuration takes those that it has.
SMALL: dict[str, Any] = dict(
    hidden_size=64, d_model=64, n_embd=64, dim=64, embed_dim=64,
    intermediate_size=128, ffn_dim=128, n_inner=128, hidden_dim=128, d_ff=128, encoder_ffn_dim=128, decoder_ffn_dim=128,
    num_hidden_layers=2, num_layers=2, n_layer=2, n_layers=2, encoder_layers=2, decoder_layers=2, num_decoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4,
    head_dim=16, d_kv=16, vocab_size=128, max_position_embeddings=512, n_positions=512,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, num_local_experts=4, num_experts=4,
    n_routed_experts=4, num_experts_per_tok=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, use_cache=False,
)  # fmt: skip

Sizes = dict[str, Any]


# ---- configurations ------------------------------------------------------------------------------------------------


def tiny(config_class: Any, sizes: Sizes) -> Any:
    """A configuration with `sizes`, and SMALL for what they leave open."""
    default = config_class()
    chosen = {**small_sizes(default, sizes), **kv_heads(default), **layer_kinds(default, sizes), **sizes}
    if getattr(default, "sliding_window", None) and "sliding_window" not in sizes:
        chosen["sliding_window"] = WINDOW
    return config_class(**chosen)


def small_sizes(default: Any, sizes: Sizes) -> Sizes:
    aliases = default.attribute_map
    chosen: Sizes = {}
    for name, value in SMALL.items():
        real = aliases.get(name, name)
        taken = name in sizes or real in sizes or (real != name and real in chosen)
        if taken or not hasattr(default, real) or isinstance(getattr(type(default), real, None), property):
            continue
        if not isinstance(getattr(default, real), (dict, list, tuple, str)):
            chosen[real] = value
    return chosen


def kv_heads(default: Any) -> Sizes:
    """Grouped heads stay grouped."""
    if not hasattr(default, "num_key_value_heads"):
        return {}
    grouped = default.num_key_value_heads not in (None, getattr(default, "num_attention_heads", 0))
    return {"num_key_value_heads": 2 if grouped else 4}


def layer_kinds(default: Any, sizes: Sizes) -> Sizes:
    """One layer of each kind, at least two layers."""
    kinds = getattr(default, "layer_types", None)
    real = default.attribute_map.get("layer_types", "layer_types")
    if not kinds or "layer_types" in sizes or isinstance(getattr(type(default), real, None), property):
        return {}
    distinct = list(dict.fromkeys(kinds))
    layers = (2 * distinct)[: max(2, len(distinct))]
    count = {} if "num_hidden_layers" in sizes else {"num_hidden_layers": len(layers)}
    return {"layer_types": layers, **count}


# ---- inputs --------------------------------------------------------------------------------------------------------


def encoder_decoder(length: int, config: Any) -> dict[str, Any]:
    source = dict(input_ids=ids(length + MEMORY), attention_mask=right_padded(length + MEMORY))
    return {**source, "decoder_input_ids": ids(length)}


def text_and_image(length: int, config: Any) -> dict[str, Any]:
    """Text with the places of an image's patches in it."""
    vision = config.vision_config
    patches = (vision.image_size // vision.patch_size) ** 2
    tokens = ids(length + patches)
    tokens[:, 3 : 3 + patches] = config.image_token_id
    return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), pixel_values=pixels(vision.image_size))


def text_and_regions(length: int, config: Any) -> dict[str, Any]:
    regions = dict(visual_feats=normal(BATCH, 36, config.visual_feat_dim), visual_pos=normal(BATCH, 36, 4))
    return dict(input_ids=ids(length), attention_mask=right_padded(length), **regions)


def audio(length: int, config: Any) -> dict[str, Any]:
    """`length` frames of 320 samples, and what the convolutions eat at the ends."""
    return dict(input_values=normal(BATCH, 320 * length + 400))


def padded_audio(length: int, config: Any) -> dict[str, Any]:
    mask = torch.ones(BATCH, 320 * length + 400, dtype=torch.long)
    mask[1, -320 * (length // 4) :] = 0
    return {**audio(length, config), "attention_mask": mask}


def series(length: int, config: Any) -> dict[str, Any]:
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    return dict(
        past_values=normal(BATCH, past), past_time_features=normal(BATCH, past, 2),
        past_observed_mask=torch.ones(BATCH, past), future_values=normal(BATCH, future),
        future_time_features=normal(BATCH, future, 2),
    )  # fmt: skip


def video(length: int, config: Any) -> dict[str, Any]:
    return dict(pixel_values=normal(BATCH, config.num_frames, 3, config.image_size, config.image_size))


INPUTS: dict[str, Callable[[int, Any], dict[str, Any]]] = {
    "text": lambda n, config: dict(input_ids=ids(n)),
    "right padded": lambda n, config: dict(input_ids=ids(n), attention_mask=right_padded(n)),
    "left padded": lambda n, config: dict(input_ids=ids(n), attention_mask=right_padded(n).flip(1)),
    "encoder and decoder": encoder_decoder,
    "image": lambda n, config: dict(pixel_values=pixels(config.image_size, getattr(config, "num_channels", 3))),
    "image of 64": lambda n, config: dict(pixel_values=pixels(64)),
    "line of text": lambda n, config: dict(pixel_values=normal(BATCH, 3, 32, 64)),
    "video": video,
    "audio": audio,
    "padded audio": padded_audio,
    "spectrum": lambda n, config: dict(input_values=normal(BATCH, config.max_length, config.num_mel_bins)),
    "speech to text": lambda n, config: dict(
        input_features=normal(BATCH, 4 * (n + MEMORY), config.input_feat_per_channel), decoder_input_ids=ids(n)
    ),
    "waveform to text": lambda n, config: dict(
        input_values=normal(BATCH, 384 * (n + MEMORY) + 900), decoder_input_ids=ids(n)
    ),
    "text and pixels": lambda n, config: dict(
        input_ids=ids(n), attention_mask=right_padded(n), pixel_values=pixels(config.image_size)
    ),
    "text and regions": text_and_regions,
    "text with image": text_and_image,
    "series": series,
    "patches of series": lambda n, config: dict(
        past_values=normal(BATCH, config.context_length, config.num_input_channels)
    ),
    "features": lambda n, config: dict(inputs=normal(BATCH, n, config.d_model)),
}  # fmt: skip
