"""Configurations of transformers made tiny by general rules: what a number is called says how small it becomes.

Configurations inside a configuration become tiny in the same way. Lists with one entry a layer are shortened together,
to the first layer of each kind. What the rules get wrong is in EXCEPTIONS, by type.
"""

from __future__ import annotations

import re
from typing import Any

from ringopt.tools.benchmarks.models.tiny_backbones import backbone_like, stages, widths

Sizes = dict[str, Any]

WIDTH, HEADS, HEAD_DIM, WINDOW, VOCABULARY, POSITIONS = 32, 4, 8, 16, 128, 2048
KINDS = 4  # layers at most

# The first that is found in the name of a number says how small it becomes, where it is larger.
RULES: tuple[tuple[str, float], ...] = (
    (r"drop|jitter|mask_(time|feature)_prob", 0.0),
    (r"^qk_head_dim|dim_model_base|_token_id|_index$|merge_size|^embed_dim$", -1),
    (r"max_source_positions", 64),
    (r"position_embeddings|n_positions|n_ctx|max_seq|context_length|_positions$|model_max_length", POSITIONS),
    (r"experts_per_tok|moe_top_?k|moe_k$", 2),
    (r"num_queries$", 16),
    (r"^depths$", 2),
    (r"bottleneck_features", WIDTH),
    (r"num_pos_feats", WIDTH // 2),
    (r"shared_experts$|topk_group|^o_groups|ngroups|mamba_n_groups|num_mem_blocks|hc_lowrank", 1),
    (r"n_group$|expert_group|zero_expert|heads_per_ngram", 2),
    (r"num_.*experts$|n_routed_experts|num_experts|hc_mult|hc_count", 4),
    (r"nextn_predict|kv_shared_layers", 0),
    (r"first_k_dense|num_dense_layers", 1),
    (r"every_n_layers|layers_per|layer_group_size", 2),
    (r"layers$|n_layer$|^num_blocks|layers_per_stack|^depth$", 2),
    (r"num_key_heads|query_groups", 2),
    (r"mamba_num_heads|mamba_n_heads|n_mamba_heads", 8),
    (r"heads$|n_head$", HEADS),
    (r"rotary_dim|head_dim|head_size|headdim|d_kv|kv_channels|d_head|dim_head|query_pre_attn|^d_rel", HEAD_DIM),
    (r"_rank$|state_size|d_state|ngram_parts", 8),
    (r"topk|window_len|window_size|sliding_window$|chunk_length|chunk_size|block_size|local_attention$", WINDOW),
    (r"rel_extent|keep_window", WINDOW),
    (r"vocab_offset", -1),
    (r"vocab|codebook_size|num_buckets", VOCABULARY),
    (r"image_size|crop_size", 64),
    (r"patch_size", 8),
    (r"intermediate_size|ffn|n_inner|^d_ff$|^dff$|_mlp$|d_inner|dim_ff|feed_forward_size|attention_hidden_size", 64),
    (r"mamba_d_ssm", 64),
    (r"hidden_size|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|embed_proj|lru_width|_dim$", WIDTH),
    (r"channels|hidden_dimension|adapter_input_size", WIDTH),
)

TOKEN = r"_token_(id|index)$"
PLACES = 12  # at the end of the vocabulary, which stand for images and the like
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
KV_HEADS = ("num_key_value_heads", "kv_n_heads", "num_kv_heads", "swa_num_key_value_heads")
# What a configuration may leave open, and its model needs.
OPEN = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "head_dim": HEAD_DIM, "hash_seed": 0}
TAPS = ("out_features",)  # stages of a backbone, by their names
NEVER = ("use_cache", "output_attentions", "output_hidden_states")

INDEXER: Sizes = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
LAYERS = ("full_attention", "sliding_attention")
PHASES = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
STAGES: Sizes = {"embed_dim": WIDTH, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
ROPE: Sizes = {"rope_type": "default", "rope_theta": 10000.0}
# By type: what is in the way of the rules.
EXCEPTIONS: dict[str, Sizes] = {
    **{kind: {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]} for kind in ("beit", "data2vec-vision")},
    "bit": {"num_groups": 4},
    "cvt": {"depth": [1, 2, 3], "num_heads": [1, 2, 4]},
    "detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dory": {**dict.fromkeys(PHASES, 1), "num_hidden_layers": 3, "layer_types": [*LAYERS, LAYERS[0]]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mamba2": {"num_heads": 8},
    "qwen2_vl_vision": {"embed_dim": WIDTH},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24]},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), STAGES),
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(LAYERS, ROPE)},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
}


def tiny(config: Any, kept: Sizes | None = None, asked: Sizes | None = None) -> Any:
    """A configuration of the type of `config`, which has its default sizes, but for those that are `kept`, and those
    that are `asked` for, whatever the rules."""
    kind = config.model_type
    return type(config)(**((kept or {}) | shrunk(config) | EXCEPTIONS.get(kind, {}) | (asked or {})))


def named(config: Any) -> Sizes:
    """What a configuration inside another one has been given in words: the name of a backbone, where it is tapped."""
    own = {name: value for name, value in fields(config).items() if isinstance(value, (str, bool))}
    return own | {name: getattr(config, name) for name in TAPS if getattr(config, name, None)}


def sections(rope: Sizes) -> list[int]:
    """How many frequencies of a head are for time, height and width."""
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def shrunk(config: Any) -> Sizes:
    """What is to be passed to the type of `config`."""
    given: Sizes = {name: False for name in NEVER if name in fields(config)}
    for name, value in fields(config).items():
        if hasattr(value, "to_dict"):
            like = backbone_like(value)
            part = tiny(like, named(like), stages(like))
            given |= {name: part.to_dict(), **(widths(config, part, WIDTH) if name == "backbone_config" else {})}
        elif name == "rope_parameters" and "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ()):
            given[name] = {**value, "mrope_section": sections(value)} if value else value
        elif name in IDS and value is not None:
            given[name] = IDS[name]
        elif name in OPEN and value is None:
            given[name] = OPEN[name]
        elif name in KV_HEADS:
            given[name] = kv_heads(config, value)
        elif re.search(TOKEN, name) and isinstance(value, int):
            given[name] = special(config, name)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            small, default = smaller(name, value), declared(type(config))[name]
            given |= {name: small} if small != (default if isinstance(default, (int, float)) else value) else {}
        elif isinstance(value, (list, tuple)) and value and all(type(part) in (int, float) for part in value):
            given |= {name: parts} if (parts := [smaller(name, part) for part in value]) != list(value) else {}
    return given | whole_layers(config, given)


def fields(config: Any) -> Sizes:
    """What can be set, by name, with its value."""
    parts = getattr(type(config), "sub_configs", {})
    held = {name: getattr(config, name) for name in parts if getattr(config, name, None) is not None}
    settable = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    return {name: value for name, value in (settable | held).items() if name in declared(type(config))}


def declared(config_class: type) -> Sizes:
    """The fields of the dataclass, with what they are by default."""
    return {name: field.default for name, field in getattr(config_class, "__dataclass_fields__", {}).items()}


def smaller(name: str, value: float) -> float:
    """A number by what it is called."""
    small = next((small for pattern, small in RULES if re.search(pattern, name)), -1)
    return value if small < 0 or value <= small else type(value)(small)


def special(config: Any, name: str) -> int:
    """A token by its name: those beyond the vocabulary are its last ones."""
    value = int(getattr(config, name))
    names = sorted(other for other in fields(config) if re.search(TOKEN, other))
    return value if value < VOCABULARY else VOCABULARY - 1 - names.index(name) % PLACES


def kv_heads(config: Any, count: int | None) -> int:
    """Grouped heads stay grouped, a single one stays single."""
    heads = vars(config).get("num_attention_heads") or vars(config).get("n_heads")
    return min(count, 2) if count and count != heads else HEADS


def whole_layers(config: Any, given: Sizes) -> Sizes:
    """The first layer of each kind, at least two."""
    depth = getattr(config, "num_hidden_layers", None)
    lists = {
        name: value
        for name, value in fields(config).items()
        if isinstance(value, list) and isinstance(depth, int) and len(value) == depth > 2
    }
    if not lists or depth is None:
        return {}
    kinds: dict[str, int] = {}
    for layer in range(depth):
        kinds.setdefault(repr([value[layer] for value in lists.values()]), layer)
    chosen = sorted(kinds.values())[:KINDS]
    chosen = chosen if len(chosen) > 1 else [chosen[0], chosen[0] + 1]
    count = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    short = {name: [given.get(name, value)[layer] for layer in chosen] for name, value in lists.items()}
    return {**short, count: len(chosen)}
