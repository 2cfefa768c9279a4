"""Models of libraries other than transformers, built tiny by general rules.

Each module `{library}_models` has `kinds()`, the names of its models, and `build(name)`: the model, in float64 and with
random weights, and the keywords of its forward. `build` raises where the rules find none. Arguments by trial and
float64 throughout are for models of transformers too.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

LIBRARIES = ("diffusers", "litgpt", "timm", "torchaudio", "torchvision", "x_transformers")


def models_of(library: str) -> Any:
    """The module of a library. Raises ImportError where that is not installed."""
    return import_module(f"{__name__}.{library}_models")
