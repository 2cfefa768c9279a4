"""Models of torchvision, one of each of its modules, the smallest by its number of parameters: of images, videos and
pairs of images, with two of each row of blocks that are alike, where that fits. (Detectors are left out, whose losses
draw samples at random, and what is quantized.)
"""

from __future__ import annotations

import inspect
import warnings
from importlib import import_module
from typing import Any

import torch.nn as nn

from ringopt.tools.benchmarks.libraries.first_that_fits import Given, first_that_fits
from ringopt.tools.benchmarks.libraries.seeded import first_of, images, seeded

LEFT_OUT = ("quantization", "detection")
CLASSES = 8
# What may be passed to a constructor besides, with the frames and the side of the images: the first that fits.
FORMS: tuple[tuple[dict[str, Any], int, int], ...] = (
    ({"image_size": 128}, 0, 128), ({"input_size": (128, 128)}, 0, 128), ({}, 0, 128), ({}, 8, 64), ({}, 16, 224),
    ({}, 0, 224), ({}, 0, 304),
)  # fmt: skip


def kinds() -> list[str]:
    """One of each module."""
    models: Any = import_module("torchvision.models")
    found: dict[str, tuple[int, str]] = {}
    for name in models.list_models():
        module = models.get_model_builder(name).__module__
        if any(part in module for part in LEFT_OUT):
            continue
        size = min((one.meta["num_params"] for one in models.get_model_weights(name)), default=1 << 62)
        found[module] = min((size, name), found.get(module, (1 << 62, name)))
    return sorted(name for _, name in found.values())


def build(name: str) -> tuple[nn.Module, Given]:
    """The model and one batch. Raises ValueError where it takes none."""
    warnings.simplefilter("ignore")
    found: tuple[nn.Module, Given] = first_of(
        lambda form: seeded(_created, name, form[0]),
        lambda model, form: _given(model, images(side=form[2], frames=form[1])),
        FORMS,
    )
    return found


def _created(name: str, sizes: dict[str, Any]) -> Any:
    builder: Any = import_module("torchvision.models").get_model_builder(name)
    asked = inspect.signature(builder).parameters
    nothing = {weights: None for weights in ("weights", "weights_backbone") if weights in asked}
    return builder(**nothing, **sizes, **({} if "flow" in builder.__module__ else {"num_classes": CLASSES}))


def _given(model: Any, batch: Any) -> Given:
    """By the names of its arguments: each one that has to be given is a batch."""
    asked = inspect.signature(model.forward).parameters
    return first_that_fits(model, {p.name: [batch] for p in asked.values() if p.default is p.empty})
