"""Backbones of transformers: towers for images, of which a model takes what some stages give.

A tiny one has as many stages as are taken, and its model is told how wide they are.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

Sizes = dict[str, Any]

HEADS = 2
OF_BACKBONE = ("encoder_in_channels", "projector_in_channels")
OF_ENCODER = "decoder_in_channels"


def backbone_like(config: Any) -> Any:
    """The same configuration; for one of timm, a library of its own, ResNet's, of as many stages."""
    if config.model_type != "timm_backbone":
        return config
    taken = config.out_indices
    return import_module("transformers").ResNetConfig(out_features=[f"stage{number}" for number in taken])


def stages(config: Any) -> Sizes:
    """What a backbone has to be given, tiny as it is, so that it has the stages that are taken of it."""
    taken = getattr(config, "out_features", None)
    names = getattr(config, "stage_names", None)
    if not taken or not names or taken == names[-1:]:
        return {"out_features": None} if taken and names else {}
    if isinstance(depths := getattr(config, "depths", None), (list, tuple)):
        heads = getattr(config, "num_heads", None)
        some = {"num_heads": [HEADS] * len(depths)} if isinstance(heads, (list, tuple)) else {}
        return {"depths": [1] * len(depths), "out_features": taken, **some}
    if getattr(config, "num_hidden_layers", None) == len(names) - 1:  # a stage each
        count = max(2, len(taken))
        return {"num_hidden_layers": count, "out_features": [f"stage{count - k}" for k in reversed(range(len(taken)))]}
    return {}


def widths(config: Any, backbone: Any, width: int) -> Sizes:
    """What the model of `config` is told of the channels of a backbone, and of its encoder, which makes `width` of
    each."""
    asked = [name for name in OF_BACKBONE if getattr(config, name, None)]
    if not asked:
        return {}
    channels = list(import_module("transformers").AutoBackbone.from_config(backbone).channels)
    encoded = {OF_ENCODER: [width] * len(getattr(config, OF_ENCODER))} if hasattr(config, OF_ENCODER) else {}
    return {**dict.fromkeys(asked, channels), **encoded}
