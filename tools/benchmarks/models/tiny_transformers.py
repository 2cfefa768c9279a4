"""Models of transformers, tiny, in float64 and with random weights: `build_tiny(kind)` for causal language models,
`build_auto(mapping, kind)` for those of another class of its factory, such as AutoModel."""

from __future__ import annotations

import copy
import re
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ringopt.tools.benchmarks.models.auto_arguments import auto_arguments, parts_of
from ringopt.tools.benchmarks.models.tiny_configs import IDS, PLACES, VOCABULARY, tiny

BATCH, LENGTH = 2, 64
LABELLED = r"LM$|TextToText|Seq2Seq"  # classes whose labels are tokens
SPECIAL = 5  # small numbers are special tokens

# Where the weights of a recurrence say how fast it forgets, a little: as they are drawn, it forgets a step within
# itself, and no comparison would notice a state that is not handed on.
MILD = {"a_log": -5.0, "recurrent_param": -6.0}

# By type: programs that Dynamo unrolls token by token; programs that work in chunks of 64 tokens, of which each rank
# wants whole ones.
WITH_IMAGES = ("git",)  # whose logits are cut as if an image stood before the text
LENGTHS = {
    **dict.fromkeys(("recurrent_gemma", "rwkv"), 24),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_next"), 256),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), 256),
}


def build_tiny(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in training mode, in which nothing is dropped at random, and the keywords of its forward."""
    config = _configured(kind)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = _built("AutoModelForCausalLM", config)
    if kind in WITH_IMAGES:
        return model, auto_arguments(model, labels=True)
    books = getattr(model.config, "num_codebooks", None) if hasattr(model, "lm_heads") else None
    shape = (BATCH, LENGTHS.get(kind, LENGTH), *([books] if books else []))
    tokens = torch.randint(SPECIAL, VOCABULARY - PLACES, shape)
    return model, {"input_ids": tokens.movedim(-1, 1).flatten(0, 1) if books else tokens, "labels": tokens}


def build_auto(mapping: str, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same with arguments found by trial. Raises ValueError where the rules find none."""
    config, classifies = _configured(kind), "SequenceClassification" in mapping
    for name in ("pad_token_id", "decoder_start_token_id"):  # of which a classifier asks
        if classifies and getattr(config, name, None) is None:
            setattr(config, name, IDS[name])
    model, labels = _built(mapping, config), bool(re.search(LABELLED, mapping))
    return model, auto_arguments(reference_of(model), labels, classifies)


def _configured(kind: str) -> Any:
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return tiny(transformers.AutoConfig.for_model(kind))


def _built(mapping: str, config: Any) -> Any:
    factory = getattr(import_module("transformers"), mapping)
    config.architectures = config.architectures or []  # of which it asks, where it has several classes for a type
    wanted = factory._model_mapping[type(config)]
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    part = next((part for part in parts_of(config) if type(part) is wanted.config_class), config)
    model = (factory.from_config(config) if part is config else wanted(part)).double().train()
    for module in model.modules():
        if vars(module).get("dtype") is torch.float32:  # to which it would take its weights back
            module.dtype = torch.float64
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread(name.lower(), parameter)
    return model


def spread(name: str, parameter: Tensor) -> None:
    """Small weights become larger ones: what mixes tokens hardly matters beside the residual of a fresh model."""
    for part, value in MILD.items():
        if part in name:
            parameter.copy_(value + 0.1 * torch.randn_like(parameter))
            return
    if parameter.dim() > 1 and 0 < float(parameter.std()) < 0.1:
        parameter.mul_(0.1 / parameter.std())


def reference_of(model: Any) -> Any:
    """A copy that runs experts one by one: the grouped products that transformers has for the CPU take no float64
    outside of a graph."""
    alike = copy.deepcopy(model)
    alike.set_experts_implementation("eager")
    return alike
