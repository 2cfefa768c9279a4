"""Arguments for `forward` of a transformer of diffusers: what an argument is called says what it may be.

Where that leaves several forms (latents as tokens, images or videos), the first that the model takes is the one. What
the rules get wrong is in OWN, by class.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ringopt.tools.benchmarks.libraries.first_that_fits import first_that_fits
from ringopt.tools.benchmarks.libraries.seeded import normal

Sizes = dict[str, Any]  # of a constructor
Given = dict[str, Any]

BATCH, TEXT, CAPTION, SIDE, FRAMES, TOKENS = 2, 32, 16, 16, 3, 64
AXES = ("axes_dims_rope", "axes_dims", "axes_dim_rope", "rope_axes_dim", "rope_dim_list", "rope_dim", "axes_dim")
ROPE = [torch.arange(FRAMES), torch.arange(SIDE // 4), torch.arange(SIDE // 4)]
LENGTHS = torch.tensor([CAPTION, CAPTION - 4])  # of captions


def arguments(model: Any, sizes: Sizes) -> Given:
    """The first that the model takes."""
    parameters = inspect.signature(model.forward).parameters
    known = dict(model.config) | sizes
    name = type(model).__name__
    own = OWN[name](known) if name in OWN else {}
    forms = {p.name: _forms_of(p.name, known, p.default is p.empty) for p in parameters.values()}
    forms = {name: [own[name]] if name in own else found for name, found in forms.items()}
    forms = {name: forms[name] for name in sorted(forms, key=_order) if forms[name]}
    return first_that_fits(model, forms)


def _order(name: str) -> int:
    """Of arguments, in which they are varied: the last one is the fastest, for most tries."""
    return 2 if name == "hidden_states" else 1 if name.endswith("_ids") else 0


def _forms_of(name: str, sizes: Sizes, needed: bool) -> list[Any]:
    """What an argument of this name may be, the likeliest first; None where it may be left out."""
    found = next((forms(sizes) for pattern, forms in FORMS if re.search(pattern, name)), [])
    if needed or not found:
        return found
    return [None, *found] if re.search(SECOND, name) else [*found, None]


def _latents(sizes: Sizes) -> list[Tensor]:
    names = ("in_channels", "in_visual_dim", "io_channels", "latent_dim", "in_dim", "latent_channel")
    channels = next((sizes[name] for name in names if sizes.get(name)), 4)
    shapes = (
        (BATCH, channels, SIDE, SIDE), (BATCH, channels, FRAMES, SIDE // 2, SIDE // 2), (BATCH, TOKENS, channels),
        (BATCH, FRAMES, channels, SIDE // 2, SIDE // 2), (BATCH, channels, TOKENS),
        (BATCH, FRAMES, SIDE // 2, SIDE // 2, channels),
    )  # fmt: skip
    return [normal(*shape) for shape in shapes]


def _widths(sizes: Sizes) -> list[int]:
    """That a caption may have."""
    found = [TEXT, *(value for name, value in sizes.items() if type(value) is int and re.search(r"dim|channels", name))]
    return sorted(set(found), key=found.index)[:4]


def _captions(sizes: Sizes) -> list[Tensor]:
    return [normal(BATCH, CAPTION, width) for width in _widths(sizes)]


def _pooled(sizes: Sizes) -> list[Tensor]:
    return [normal(BATCH, width) for width in _widths(sizes)]


def _masks(sizes: Sizes) -> list[Tensor]:
    """Of a caption whose second sample is shorter."""
    mask = torch.ones(BATCH, CAPTION, dtype=torch.long)
    mask[1, CAPTION - CAPTION // 4 :] = 0
    return [mask, mask.bool(), mask.double()]


def _times(sizes: Sizes) -> list[Tensor]:
    return [torch.tensor([0.5, 0.7], dtype=torch.float64), torch.tensor([5, 9])]


def _ids(tokens: int) -> Callable[[Sizes], list[Tensor]]:
    """Where tokens are, along each axis."""

    def of(sizes: Sizes) -> list[Tensor]:
        axes = len(next((sizes[name] for name in AXES if sizes.get(name)), (0, 0, 0)))
        places = torch.stack([torch.arange(tokens) // (axis + 1) for axis in range(axes)], -1).double()
        return [places, places.expand(BATCH, -1, -1)]

    return of


def _guidances(sizes: Sizes) -> list[Tensor | None]:
    return [torch.tensor([3.0, 4.0], dtype=torch.float64)] if sizes.get("guidance_embeds") else [None]


def _lumina_rope(sizes: Sizes) -> Tensor:
    embeddings: Any = import_module("diffusers.models.embeddings")
    depth = sizes["hidden_size"] // sizes["num_attention_heads"]
    made: Tensor = embeddings.get_2d_rotary_pos_embed_lumina(depth, SIDE, SIDE)
    return made


SECOND = r"(_2|_r)$"  # of arguments that are a second one of their kind, and are rather left out
FORMS: tuple[tuple[str, Callable[[Sizes], list[Any]]], ...] = (
    (r"^return_dict$", lambda _: [False]),
    (r"kwargs|controlnet|kv_cache|guidance_blocks|skip_layers", lambda _: []),
    (r"^hidden_states$", _latents),
    (r"^img_ids$", _ids(TOKENS)),
    (r"^txt_ids$", _ids(CAPTION)),
    (r"encoder_hidden_states_image|image_embeds|id_cond|id_vit|^attention_mask", lambda _: [None]),
    (r"pooled|global_hidden_states|projections|proj_embedding", _pooled),
    (r"mask", _masks),
    (r"encoder_hidden_states|^cap_feats$|^text_bth$", _captions),
    (r"^(r_)?timesteps?$|^timestep_r$", _times),
    (r"^guidance$", _guidances),
    (r"^(num_frames|height|width)$", lambda _: [4]),
    (r"original_size|target_size|crop_coords", lambda _: [torch.full((BATCH, 2), float(SIDE), dtype=torch.float64)]),
    (r"img_shapes", lambda _: [[[(1, 8, 8)]] * BATCH]),
    (r"class_labels", lambda _: [torch.tensor([1, 2])]),
)

# Arguments of a class that no rule makes, of its sizes.
OWN: dict[str, Callable[[Sizes], Given]] = {
    "AceStepTransformer1DModel": lambda sizes: {
        "hidden_states": normal(BATCH, TOKENS, 64), "context_latents": normal(BATCH, TOKENS, 128),
        "encoder_hidden_states": normal(BATCH, CAPTION, sizes["hidden_size"]),
    },
    "AnyFlowTransformer3DModel": lambda sizes: {
        "timestep": normal(BATCH, FRAMES).abs(), "r_timestep": normal(BATCH, FRAMES).abs() / 2,
    },
    "BriaFiboTransformer2DModel": lambda sizes: {"text_encoder_layers": [normal(BATCH, CAPTION, TEXT)] * 4},
    "ErnieImageTransformer2DModel": lambda sizes: {"text_lens": LENGTHS},
    "GlmImageTransformer2DModel": lambda sizes: {
        "prior_token_id": torch.arange(TOKENS).expand(BATCH, -1), "prior_token_drop": torch.arange(BATCH) > 0,
    },
    "HunyuanVideo15Transformer3DModel": lambda sizes: {
        "encoder_hidden_states_2": normal(BATCH, CAPTION, TEXT), "image_embeds": normal(BATCH, 8, TEXT),
        "encoder_attention_mask_2": _masks(sizes)[0],
    },
    "Kandinsky5Transformer3DModel": lambda sizes: {
        "visual_rope_pos": ROPE, "text_rope_pos": torch.arange(CAPTION), "pooled_projections": normal(BATCH, TEXT),
    },
    "Kandinsky6Transformer3DModel": lambda sizes: {"visual_rope_pos": ROPE, "pooled_projections": normal(BATCH, TEXT)},
    "Krea2Transformer2DModel": lambda sizes: {
        "encoder_hidden_states": normal(BATCH, CAPTION, sizes["num_text_layers"], sizes["text_hidden_dim"]),
        "position_ids": _ids(CAPTION + TOKENS)({})[0], "encoder_attention_mask": _masks(sizes)[1],
    },
    "LuminaNextDiT2DModel": lambda sizes: {
        "encoder_mask": _masks(sizes)[1], "image_rotary_emb": _lumina_rope(sizes), "cross_attention_kwargs": {},
    },
    "MiniMaxMusic3RVQDepthDecoder": lambda sizes: {"inputs_embeds": normal(BATCH, 12, sizes["hidden_size"])},
    "PixArtTransformer2DModel": lambda sizes: {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    "PriorTransformer": lambda sizes: {"hidden_states": normal(BATCH, TEXT)},
    "T5FilmDecoder": lambda sizes: {
        "encodings_and_masks": [(normal(BATCH, CAPTION, sizes["d_model"]), _masks(sizes)[0])],
        "decoder_input_tokens": normal(BATCH, TOKENS, sizes["input_dims"]), "decoder_noise_time": _times(sizes)[0],
    },
    "TransformerTemporalModel": lambda sizes: {
        "hidden_states": normal(BATCH * FRAMES, TEXT, SIDE // 4, SIDE // 4), "num_frames": FRAMES,
    },
    "WanVACETransformer3DModel": lambda sizes: {
        "control_hidden_states": normal(BATCH, sizes["vace_in_channels"], FRAMES, SIDE // 2, SIDE // 2),
    },
    "ZImageTransformer2DModel": lambda sizes: {
        "x": [normal(sizes["in_channels"], 1, SIDE, SIDE)] * BATCH, "t": _times(sizes)[0],
        "cap_feats": [normal(int(length), TEXT) for length in LENGTHS],
    },
}  # fmt: skip
