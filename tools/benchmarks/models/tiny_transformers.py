"""Causal language models of transformers, tiny, in float64 and with random weights: `build_tiny(kind)`."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ringopt.tools.benchmarks.models.tiny_configs import VOCABULARY, tiny

BATCH, LENGTH = 2, 64
SPECIAL = 5  # small numbers are special tokens

# Where the weights of a recurrence say how fast it forgets, a little: as they are drawn, it forgets a step within
# itself, and no comparison would notice a state that is not handed on.
MILD = {"a_log": -5.0, "recurrent_param": -6.0}

# By type: programs that Dynamo unrolls token by token; programs that work in chunks of 64 tokens, of which each rank
# wants whole ones.
LENGTHS = {
    **dict.fromkeys(("recurrent_gemma", "rwkv"), 24),
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_next"), 256),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), 256),
}


def build_tiny(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in training mode, in which nothing is dropped at random, and the keywords of its forward."""
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = tiny(transformers.AutoConfig.for_model(kind))
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread(name.lower(), parameter)
    tokens = torch.randint(SPECIAL, VOCABULARY - SPECIAL, (BATCH, LENGTHS.get(kind, LENGTH)))
    return model, {"input_ids": tokens, "labels": tokens}


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
