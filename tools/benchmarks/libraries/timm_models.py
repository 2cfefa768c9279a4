"""Image models of timm, one of each of its modules: the smallest, with two of each row of blocks that are alike, where
that fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch.nn as nn

from ringopt.tools.benchmarks.libraries.first_that_fits import Given, first_that_fits
from ringopt.tools.benchmarks.libraries.seeded import first_of, images, seeded

# Of sizes in the names of models, the smaller ones first.
SMALL = (
    "test_", "zepto", "atto", "femto", "pico", "nano", "xxs", "micro", "mini", "tiny", "_xs", "_s", "b0", "_t",
    "18", "26", "small",
)  # fmt: skip
SIDES = (128, 160, 192, 224, 240, 256, 288, 384)  # of the image: the first that the model takes
CLASSES = 8


def kinds() -> list[str]:
    """One of each module."""
    timm: Any = import_module("timm")
    models = (timm.list_models(module=module) for module in timm.list_modules())
    return sorted(smallest(names) for names in models if names)


def smallest(names: Sequence[str]) -> str:
    """By what they are called: of sizes that are alike the shortest name, as 5m of 5m and 21m."""
    return min(names, key=lambda name: (_size(name), len(name), name))


def _size(name: str) -> int:
    return next((place for place, part in enumerate(SMALL) if part in name), len(SMALL))


def build(name: str) -> tuple[nn.Module, Given]:
    """The model and one batch of images. Raises ValueError where it takes none."""
    warnings.simplefilter("ignore")
    create: Any = import_module("timm").create_model
    found: tuple[nn.Module, Given] = first_of(
        lambda form: seeded(create, name, num_classes=CLASSES, **form[1]),
        lambda model, form: first_that_fits(model, {"x": [images(form[0])]}),
        [(side, sizes) for side in SIDES for sizes in ({"img_size": side}, {})],
    )
    return found
