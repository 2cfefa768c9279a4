"""Two layers of models that people run, as wide as those are, with random weights: `build_wide(family)`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn

VOCABULARY = 1024  # an embedding is no layer, and of 150,000 words it would be most of what there is


@dataclass(frozen=True)
class Family:
    """`kind` as transformers calls it, `sizes` of its configuration, and what is `smaller` than in the model."""

    kind: str
    sizes: dict[str, Any]
    smaller: str = ""


FAMILIES = {
    "Llama-3-8B": Family(
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"rope_theta": 500000.0},
    ),
    "DeepSeek-V2-Lite": Family(  # a dense layer, and one of experts
        "deepseek_v2",
        {"hidden_size": 2048, "intermediate_size": 10944, "num_attention_heads": 16, "num_key_value_heads": 16}
        | {"kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
        | {"v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}
        | {"moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_method": "greedy"}
        | {"n_group": 1, "topk_group": 1},
    ),
    "Qwen3-Next-80B": Family(
        "qwen3_next",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
        | {"linear_value_head_dim": 128, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "num_experts": 32}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "32 of 512 experts",
    ),
}


def build_wide(family: Family) -> nn.Module:
    """In float32 and in training mode; the same weights each time."""
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "use_cache": False, **family.sizes}
    config = transformers.AutoConfig.for_model(family.kind, **sizes)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return made.train()
