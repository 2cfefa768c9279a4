"""Arguments for `forward` of a model of transformers: what an argument is called says what it may be.

Where that leaves several forms (images, videos or patches; sound or its spectrum), the first that the model takes is
the one. A text has as many places for an image, a video or a sound as the model makes of it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringopt.tools.benchmarks.libraries.first_that_fits import first_that_fits
from ringopt.tools.benchmarks.models.tiny_configs import IDS, PLACES
from ringopt.torch_compat.pytree import tree_leaves

Given = dict[str, Any]

BATCH, LENGTH, ANSWER, FRAMES, GRID, SOUND = 2, 64, 24, 4, 8, 4000
SPECIAL = 5  # small numbers are special tokens
MEDIA = ("image", "video", "audio")
# Of optional arguments, those that are given where a model has them; of others that are needed nothing is left out.
WANTED = (
    r"^(decoder_)?input_ids$|^pixel_values$|^input_(features|values)$|^(image_)?grid_thw$|^bbox$|^noise$|^states$"
    r"|^mm_token_type_ids$|^image_sizes$|^future_(values|time_features)$|^(qformer_)?input_ids$|^visual_(feats|pos)$"
    r"|^spatial_shapes$|^pixel_attention_mask$"
)  # fmt: skip


def auto_arguments(model: Any, labels: bool, ends: bool = False) -> Given:
    """The first that the model takes, with the tokens as labels where it has some and `labels` says so. `ends`: a text
    has a token for its end, where a classifier looks, and a decoder reads it too."""
    parameters = inspect.signature(model.forward).parameters
    forms = {}
    for parameter in parameters.values():
        needed = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        found = _forms_of(parameter.name, model, needed or parameter.name == model.main_input_name)
        if found:
            forms[parameter.name] = found
    if ends and "input_ids" in forms:
        forms.pop("decoder_input_ids", None)
        forms["input_ids"][0][:, -1] = size(model.config, "eos_token_id", IDS["eos_token_id"])
    given = first_that_fits(model, forms, lambda chosen: _with_places(model, chosen))
    if labels and "labels" in parameters:
        given["labels"] = given.get("decoder_input_ids", given.get("input_ids"))
    return given


def _forms_of(name: str, model: Any, needed: bool) -> list[Any]:
    """What an argument of this name may be, the likeliest first; None where it may be left out."""
    if not needed and not re.search(WANTED, name):
        return []
    found = next((forms(model.config) for pattern, forms in FORMS if re.search(pattern, name)), [])
    return found if needed else [*found, None]


# ---- of configurations -----------------------------------------------------------------------------------------------


def parts_of(config: Any) -> list[Any]:
    """A configuration and those inside it, outer ones first."""
    held = [getattr(config, name, None) for name in getattr(type(config), "sub_configs", {})]
    inner = [part for part in held if hasattr(part, "to_dict")]
    return [config, *(deep for part in inner for deep in parts_of(part))]


def size(config: Any, names: str, otherwise: int) -> int:
    """The first number of one of these names (separated by blanks); of a list, its first entry."""
    for part in parts_of(config):
        for name in names.split():
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if type(value) is int:
                return value
    return otherwise


# ---- texts -----------------------------------------------------------------------------------------------------------


def _tokens(length: int) -> Callable[[Any], list[Any]]:
    def of(config: Any) -> list[Any]:
        words = size(config, "vocab_size", 128)
        shape = (BATCH, min(length, size(config, "max_position_embeddings n_positions", length)))
        return [torch.randint(SPECIAL, max(words - PLACES, SPECIAL + 1), shape, generator=_seeded(length))]

    return of


def _with_places(model: Any, given: Given) -> Given:
    """The tokens have places for what a model makes of images, videos and sounds."""
    tokens = given.get("input_ids")
    if tokens is None:
        return given
    kinds = torch.zeros_like(tokens)
    for number, medium in enumerate(MEDIA):
        token = getattr(model.config, f"{medium}_token_id", getattr(model.config, f"{medium}_token_index", None))
        if token is None or not (count := _features(model, medium, given)):
            continue
        places = torch.full((BATCH, count // BATCH), token)
        tokens = torch.cat([tokens[:, :4], places, tokens[:, 4:]], 1)
        kinds = torch.cat([kinds[:, :4], torch.full_like(places, number + 1), kinds[:, 4:]], 1)
    if "mm_token_type_ids" in given:
        given = given | {"mm_token_type_ids": kinds if given["mm_token_type_ids"] is not None else None}
    return given | {"input_ids": tokens}


def _features(model: Any, medium: str, given: Given) -> int:
    """How many vectors a model makes of its images, videos or sounds; 0 where it has none."""
    make = getattr(model, f"get_{medium}_features", None)
    if make is None:
        return 0
    names = [name for name in inspect.signature(make).parameters if given.get(name) is not None]
    if not names:
        return 0
    with torch.no_grad():
        made = make(**{name: given[name] for name in names})
    made = getattr(made, "pooler_output", made)
    text = model.config.get_text_config()
    parts = [part for part in tree_leaves(made) if isinstance(part, Tensor) and part.is_floating_point()]
    return sum(part.numel() for part in parts) // int(text.hidden_size)


# ---- images, videos, sounds ------------------------------------------------------------------------------------------


def _images(config: Any) -> list[Any]:
    side = size(config, "image_size img_size input_size", 64)
    channels = size(config, "num_channels in_channels in_chans", 3)
    patch = size(config, "patch_size", 8)
    frames = size(config, "temporal_patch_size", 1)
    shown = size(config, "num_frames frames_per_clip", FRAMES)
    shapes = (
        (BATCH, channels, side, side), (BATCH * GRID * GRID, channels * frames * patch * patch),
        (BATCH, shown, channels, side, side), (BATCH, 1, channels, side, side), (BATCH, 5, channels, side, side),
        (BATCH, GRID * GRID, channels * patch * patch), (BATCH * GRID * GRID, channels, patch, patch),
    )  # fmt: skip
    return [normal(*shape) for shape in shapes]


def _sounds(config: Any) -> list[Any]:
    bins = size(config, "num_mel_bins feature_size input_feat_per_channel n_mels input_dim", 80)
    long = size(config, "max_length", 128)
    return [
        normal(BATCH, SOUND), normal(BATCH, 1, SOUND), normal(BATCH, long, bins), normal(BATCH, bins, long),
        normal(BATCH, bins),
    ]  # fmt: skip


def _spectra(config: Any) -> list[Any]:
    bins = size(config, "num_mel_bins feature_size feature_projection_input_dim input_feat_per_channel n_mels", 80)
    long = 2 * size(config, "max_source_positions", LENGTH)
    return [normal(BATCH, bins, long), normal(BATCH, long, bins), normal(BATCH, 1, long, bins)]


def _grids(config: Any) -> list[Any]:
    return [torch.tensor([[1, GRID, GRID]] * BATCH)]


def _boxes(config: Any) -> list[Any]:
    corner = torch.randint(0, 15, (BATCH, LENGTH, 2), generator=_seeded(2))
    return [torch.cat([corner, corner + 10], -1)]


def _image_sizes(config: Any) -> list[Any]:
    side = size(config, "image_size", 64)
    return [torch.tensor([[side, side]] * BATCH)]


def _hidden(config: Any) -> list[Any]:
    """Of towers for images, their patches."""
    return [_images(config)[1], normal(BATCH, LENGTH, size(config, "hidden_size d_model", 32))]


def _noise(config: Any) -> list[Any]:
    side, patch = size(config, "image_size", 64), size(config, "patch_size", 8)
    return [torch.rand(BATCH, (side // patch) ** 2, generator=_seeded(3), dtype=torch.float64)]


def _series(config: Any) -> list[Any]:
    past = size(config, "context_length", LENGTH)
    lags = getattr(config, "lags_sequence", None) or [0]
    channels = size(config, "num_input_channels", 1)
    return [normal(BATCH, past + max(lags)), normal(BATCH, past, channels)]


def _like_series(width: str, ahead: bool) -> Callable[[Any], list[Any]]:
    def of(config: Any) -> list[Any]:
        past = size(config, "context_length", LENGTH) + max(getattr(config, "lags_sequence", None) or [0])
        steps = size(config, "prediction_length", 1) if ahead else past
        return [normal(BATCH, steps, size(config, width, 1)), torch.ones(BATCH, steps, dtype=torch.float64)]

    return of


def normal(*shape: int) -> Tensor:
    """Random numbers that depend on the shape alone."""
    return torch.randn(*shape, dtype=torch.float64, generator=_seeded(len(shape)))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


FORMS: tuple[tuple[str, Callable[[Any], list[Any]]], ...] = (
    (r"^(return_dict|use_cache)$", lambda _: [True]),
    (r"kwargs|past_key_values", lambda _: []),
    (r"^decoder_input_ids$", _tokens(ANSWER)),
    (r"^qformer_input_ids$", _tokens(8)),
    (r"input_ids$", _tokens(LENGTH)),
    (r"^mm_token_type_ids$", lambda _: [torch.zeros(BATCH, LENGTH, dtype=torch.long)]),
    (r"^(pixel_values(_images|_videos)?|frames?)$", _images),
    (r"grid_thw$", _grids),
    (r"^image_sizes$", _image_sizes),
    (r"^spatial_shapes$", lambda _: [torch.tensor([[GRID, GRID]] * BATCH)]),
    (r"^(input_values|audio_values|latents)$", _sounds),
    (r"^(input_features|audio_mel)$", _spectra),
    (r"^hidden_states$", _hidden),
    (r"^(query_embeds|inputs_embeds)$", lambda config: [normal(BATCH, LENGTH, size(config, "hidden_size", 32))]),
    (r"^bbox$", _boxes),
    (r"^noise$", _noise),
    (r"^past_(values)$", _series),
    (r"^past_time_features$", _like_series("num_time_features", False)),
    (r"^past_observed_mask$", lambda config: [torch.ones_like(value) for value in _series(config)]),
    (r"^future_values$", lambda config: [normal(BATCH, size(config, "prediction_length", 1))]),
    (r"^future_time_features$", _like_series("num_time_features", True)),
    (r"^visual_feats$", lambda config: [normal(BATCH, 16, size(config, "visual_feat_dim", 32))]),
    (r"^visual_pos$", lambda config: [torch.rand(BATCH, 16, 4, generator=_seeded(4), dtype=torch.float64)]),
    (r"_mask$", lambda config: [torch.ones(BATCH, LENGTH, dtype=torch.long), torch.ones(BATCH, 2 * LENGTH).bool()]),
)  # fmt: skip
