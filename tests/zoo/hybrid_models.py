"""Models of transformers with recurrences, made tiny: linear attention and state spaces, alone or beside attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

from tests.zoo.inputs import ids
from tests.zoo.transformers_parts import Sizes

COMMON: Sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=8192, use_cache=False, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
EXPERTS: Sizes = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)
DELTA: Sizes = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)
LATENT: Sizes = dict(kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8)
KDA: Sizes = dict(LATENT, num_key_value_heads=4, linear_num_heads=4, linear_head_dim=8)
SPACE: Sizes = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
MIXED: Sizes = dict(layer_types=["linear_attention", "full_attention"])

HYBRIDS: dict[str, Sizes] = {
    "qwen3_next": dict(EXPERTS, **DELTA, **MIXED),
    "qwen3_5_text": dict(DELTA, **MIXED),
    "olmo_hybrid": dict(DELTA, **MIXED),
    "kimi_linear": dict(KDA, **MIXED, mlp_layer_types=["dense", "dense"]),
    "bailing_hybrid": dict(KDA, **MIXED, mlp_layer_types=["dense", "dense"], num_nextn_predict_layers=0),
    "minimax": dict(**MIXED, block_size=16, num_local_experts=2, num_experts_per_tok=1),
    "mamba": dict(state_size=8, time_step_rank=4, intermediate_size=64),
    "falcon_mamba": dict(state_size=8, time_step_rank=4, intermediate_size=64),
    "mamba2": dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=16),
    "jamba": dict(
        mamba_d_state=8, mamba_dt_rank=4, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False,
    ),
    "bamba": dict(SPACE, attn_layer_indices=[1]),
    "zamba": dict(
        mamba_d_state=8, mamba_dt_rank=4, n_mamba_heads=2, use_mamba_kernels=False, attention_hidden_size=64,
        attention_head_dim=16, num_key_value_heads=4, num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid"] * 2,
    ),
    "zamba2": dict(
        mamba_d_state=8, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1, chunk_size=16, num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid"], num_mem_blocks=1, hybrid_layer_ids=[1],
    ),
    "falcon_h1": dict(SPACE, mamba_d_ssm=64),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "full_attention"], mamba_num_heads=8, mamba_head_dim=8,
        ssm_state_size=8, n_groups=1, chunk_size=16,
    ),
    "granitemoehybrid": dict(SPACE, **MIXED, num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32),
    "recurrent_gemma": dict(lru_width=32, attention_window_size=16, num_key_value_heads=1, num_hidden_layers=3),
    "lfm2": dict(layer_types=["conv", "full_attention"]),
    "lfm3": dict(layer_types=["conv", "full_attention"], conv_L_cache=3),
    "rwkv": dict(attention_hidden_size=32, context_length=4096),
    "xlstm": dict(embedding_dim=32, num_blocks=2, num_heads=4, chunk_size=16, mode="train"),
}  # fmt: skip

# What forgets a step within itself, no comparison would notice to be dropped: as they are drawn, decays do.
MILD = {"a_log": -5.0, "recurrent_param": -6.0}


def build(name: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model with labels, in float64 and training mode (nothing is dropped at random)."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    settings = {**COMMON, **HYBRIDS[name]}
    config = transformers.AutoConfig.for_model(name, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            for part, value in MILD.items():
                if part in key.lower():
                    parameter.copy_(value + 0.1 * torch.randn_like(parameter))
    tokens = ids(length) % 60 + 3
    return model, dict(input_ids=tokens, labels=tokens)
