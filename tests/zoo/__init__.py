"""Models that nobody wrote for ringopt, tiny and with random weights: `build(name, length) -> (module, keywords)`.

A name is "family/model" or "family/model@implementation". `TRUTH` says what is in each, counted by following the data
through a run of it (products, softmax, products; calls of scaled_dot_product_attention), not by any code of ringopt.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from tests.zoo import (
    diffusers_models,
    handwritten,
    timm_models,
    torch_nn,
    transformers_models,
    vit_pytorch_models,
    x_transformers_models,
)
from tests.zoo.packages import missing

__all__ = ["TRUTH", "Truth", "build", "missing", "names"]


@dataclass(frozen=True)
class Truth:
    """What is in a model.

    eligible  sites of softmax attention over tokens, fused or not
    cross     those of them whose keys are another sequence
    forms     how they are spelled: "sdpa", "eager"
    masks     what is added to their scores
    whole     Dynamo takes the model as one graph
    """

    eligible: int
    cross: int
    forms: tuple[str, ...]
    masks: tuple[str, ...]
    whole: bool


TRUTH = {
    name: Truth(facts["eligible"], facts["cross"], tuple(facts["forms"]), tuple(facts["masks"]), facts["whole"])
    for name, facts in json.loads((Path(__file__).parent / "truth.json").read_text()).items()
}


def names() -> list[str]:
    return list(TRUTH)


def family(name: str) -> str:
    return name.partition("/")[0]


def build(name: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model in eval mode, with the same weights on every call, and the keyword arguments of its forward.

    A model of images takes the largest square of patches that has at most `length` of them, or, where its stages fix
    it, an image of its own size. Raises ImportError where the package is missing: see `missing`.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    reason = missing(family(name))
    if reason:
        raise ImportError(reason)
    model, _, implementation = name.partition("/")[2].partition("@")
    module, inputs = build_in(family(name), model, implementation, length)
    return module.eval(), inputs


def build_in(family: str, model: str, implementation: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    with_implementation = {"hf": transformers_models, "timm": timm_models, "diffusers": diffusers_models}
    if family in with_implementation:
        return with_implementation[family].build(model, implementation, length)
    plain = {"hand": handwritten, "nn": torch_nn, "xt": x_transformers_models, "vitp": vit_pytorch_models}
    return plain[family].build(model, length)
