"""Models of litgpt: of its configurations those that differ in more than sizes, made tiny."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn

from ringopt.tools.benchmarks.libraries.first_that_fits import Given
from ringopt.tools.benchmarks.libraries.seeded import seeded

WORDS, TOKENS = 64, 64
SIZES = {
    "block_size": 128, "vocab_size": WORDS, "padded_vocab_size": WORDS, "n_layer": 2, "n_head": 4, "n_embd": 32,
    "head_size": 8, "intermediate_size": 48,
}  # fmt: skip
# What only some have, where they have more of it.
MOST = {
    "n_query_groups": 2,
    "sliding_window_size": 16,
    "moe_intermediate_size": 16,
    "n_expert": 4,
    "n_expert_per_token": 2,
}
PER_LAYER = ("sliding_window_indices", "rope_indices")
NAMES = ("name", "hf_config")


def kinds() -> list[str]:
    """The first of each kind of configuration."""
    config: Any = import_module("litgpt.config")
    found: dict[tuple[Any, ...], str] = {}
    for name in config.name_to_config:
        found.setdefault(_kind(config.Config.from_name(name)), name)
    return sorted(found.values())


def _kind(config: Any) -> tuple[Any, ...]:
    """What it switches on and off, and has some of or none."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return tuple(
        value if value is None or isinstance(value, (bool, str)) else bool(value)
        for name, value in values.items()
        if name not in NAMES
    )


def build(name: str) -> tuple[nn.Module, Given]:
    """The model and the tokens of two samples."""
    config: Any = import_module("litgpt.config").Config
    large = config.from_name(name)
    most = {field: min(at_most, now) for field, at_most in MOST.items() if (now := getattr(large, field))}
    layers = {field: now[-SIZES["n_layer"] :] for field in PER_LAYER if (now := getattr(large, field))}
    tiny = config.from_name(name, **SIZES, **most, **layers)
    return seeded(import_module("litgpt.model").GPT, tiny), {
        "idx": torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    }
