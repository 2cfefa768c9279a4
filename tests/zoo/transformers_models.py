"""Models of transformers, made tiny: `build(name, implementation, length)`, implementation "sdpa" or "eager"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from tests.zoo.inputs import square
from tests.zoo.transformers_parts import INPUTS, WINDOW, Sizes, tiny


@dataclass(frozen=True)
class Entry:
    """The class of the model, what its configuration overrides (a function where that depends on the length), and
    which of INPUTS it takes."""

    model: str
    sizes: Sizes | Callable[[int], Sizes] = field(default_factory=dict)
    inputs: str = "text"


SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW)
SWIN = dict(image_size=64, patch_size=4, depths=[2, 2], num_heads=[2, 4], embed_dim=32, window_size=4)
PYRAMID = dict(hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4])
WAVES = dict(
    conv_dim=[16] * 7, num_feat_extract_layers=7, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
    mask_time_prob=0.0, layerdrop=0.0, apply_spec_augment=False,
)  # fmt: skip
LATENT = dict(
    q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, head_dim=8,
    num_key_value_heads=4, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
HASHED = dict(
    is_decoder=True, attn_layers=["local", "lsh"], axial_pos_shape=[8, 8], axial_pos_embds_dim=[32, 32],
    attention_head_size=16, feed_forward_size=128, local_attn_chunk_length=16, lsh_attn_chunk_length=16, num_buckets=4,
    hash_seed=0, num_hashes=1,
)  # fmt: skip
MOONSHINE = {
    f"{part}_num_{what}": count for part in ("encoder", "decoder")
    for what, count in (("hidden_layers", 2), ("attention_heads", 4), ("key_value_heads", 4))
}  # fmt: skip
LLAVA = dict(
    image_token_id=120, image_seq_length=16,
    text_config=dict(
        model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, use_cache=False,
    ),
    vision_config=dict(
        model_type="clip_vision_model", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, image_size=32, patch_size=8,
    ),
)  # fmt: skip


def patches(length: int) -> Sizes:
    return dict(image_size=square(length), patch_size=8)


def forecast(length: int) -> Sizes:
    return dict(
        context_length=length, prediction_length=length // 2, num_time_features=2, lags_sequence=[1, 2, 3], d_model=32
    )


DECODERS = {
    "llama_pad": Entry("LlamaForCausalLM", inputs="left padded"),
    "mistral": Entry("MistralForCausalLM", dict(sliding_window=WINDOW)),
    "qwen2": Entry("Qwen2ForCausalLM"),
    "qwen3": Entry("Qwen3ForCausalLM"),
    "gemma2": Entry("Gemma2ForCausalLM", dict(query_pre_attn_scalar=16)),
    "gemma3": Entry("Gemma3ForCausalLM", dict(SLIDING, query_pre_attn_scalar=16)),
    "gpt_neo": Entry(
        "GPTNeoForCausalLM",
        dict(attention_types=[[["global", "local"], 1]], num_layers=2, window_size=WINDOW, hidden_size=64, num_heads=4),
    ),
    "codegen": Entry("CodeGenForCausalLM", dict(rotary_dim=8)),
    "falcon_alibi": Entry(
        "FalconForCausalLM", dict(alibi=True, multi_query=False, new_decoder_architecture=False), "left padded"
    ),
    "mpt": Entry("MptForCausalLM", dict(max_seq_len=512), "left padded"),
    "phi": Entry("PhiForCausalLM"),
    "olmo3": Entry("Olmo3ForCausalLM", SLIDING),
    "opt": Entry("OPTForCausalLM", dict(word_embed_proj_dim=64)),
    "cohere": Entry("CohereForCausalLM"),
    "deepseek_v3": Entry("DeepseekV3ForCausalLM", LATENT),
    "gpt_oss": Entry("GptOssForCausalLM", SLIDING),
    "granite": Entry("GraniteForCausalLM", dict(attention_multiplier=0.1)),
    "mixtral": Entry("MixtralForCausalLM"),
    "persimmon": Entry("PersimmonForCausalLM"),
    "nemotron": Entry("NemotronForCausalLM"),
    "gpt_bigcode": Entry("GPTBigCodeForCausalLM"),
    "smollm3": Entry("SmolLM3ForCausalLM"),
    "glm4": Entry("Glm4ForCausalLM", dict(num_key_value_heads=2)),
    "biogpt": Entry("BioGptForCausalLM"),
    "ctrl": Entry("CTRLLMHeadModel", dict(dff=128)),
    "llama4_text": Entry(
        "Llama4ForCausalLM",
        dict(
            attention_chunk_size=WINDOW, intermediate_size_mlp=128, layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0], moe_layers=[0, 1],
        ),
    ),
    "helium": Entry("HeliumForCausalLM"),
    "nanochat": Entry("NanoChatForCausalLM"),
    "exaone4": Entry("Exaone4ForCausalLM", dict(SLIDING, sliding_window_pattern=2)),
    "doge": Entry("DogeForCausalLM", dict(keep_window_size=512)),
    "xlnet": Entry("XLNetLMHeadModel", dict(d_inner=128), "right padded"),
    "mamba": Entry("MambaForCausalLM", dict(state_size=8)),
    "reformer": Entry("ReformerModelWithLMHead", HASHED),
    "jetmoe": Entry("JetMoeForCausalLM", dict(kv_channels=16, num_key_value_heads=2)),
    "moshi": Entry("MoshiForCausalLM", dict(num_codebooks=2, sliding_window=WINDOW)),
    "bitnet": Entry("BitNetForCausalLM"),
    "lfm2": Entry("Lfm2ForCausalLM", dict(layer_types=["conv", "full_attention"])),
    "recurrent_gemma": Entry(
        "RecurrentGemmaForCausalLM", dict(lru_width=64, attention_window_size=WINDOW, num_hidden_layers=3)
    ),
    "falcon_h1": Entry(
        "FalconH1ForCausalLM",
        dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1),
    ),
}  # fmt: skip

ENCODERS = {
    "bert": Entry("BertModel", inputs="right padded"),
    "roberta": Entry("RobertaModel", inputs="right padded"),
    "electra": Entry("ElectraModel", dict(embedding_size=64), "right padded"),
    "distilbert": Entry("DistilBertModel", inputs="right padded"),
    "xlm_roberta": Entry("XLMRobertaModel", inputs="right padded"),
    "megatron_bert": Entry("MegatronBertModel", inputs="right padded"),
    "data2vec_text": Entry("Data2VecTextModel", inputs="right padded"),
    "modernbert": Entry(
        "ModernBertModel",
        dict(
            local_attention=WINDOW, global_attn_every_n_layers=2, layer_types=["full_attention", "sliding_attention"],
            cls_token_id=1, sep_token_id=2, reference_compile=False,
        ),
        "right padded",
    ),
    "deberta": Entry(
        "DebertaModel",
        dict(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=64),
        "right padded",
    ),
    "longformer": Entry("LongformerModel", dict(attention_window=[WINDOW, WINDOW]), "right padded"),
    "esm": Entry(
        "EsmModel", dict(position_embedding_type="rotary", mask_token_id=3, token_dropout=False), "right padded"
    ),
    "mpnet": Entry("MPNetModel", inputs="right padded"),
    "roformer": Entry("RoFormerModel", dict(embedding_size=64), "right padded"),
    "rembert": Entry("RemBertModel", dict(input_embedding_size=64, output_embedding_size=64), "right padded"),
    "convbert": Entry("ConvBertModel", dict(embedding_size=64), "right padded"),
    "eurobert": Entry("EuroBertModel", inputs="right padded"),
    "nomic_bert": Entry("NomicBertModel", inputs="right padded"),
    "perceiver": Entry(
        "PerceiverModel",
        dict(
            num_latents=32, d_latents=64, num_self_attends_per_block=2, num_self_attention_heads=4,
            num_cross_attention_heads=4,
        ),
        "features",
    ),
}  # fmt: skip

PAIRS = {
    "umt5": Entry("UMT5ForConditionalGeneration", inputs="encoder and decoder"),
    "switch_transformers": Entry(
        "SwitchTransformersForConditionalGeneration",
        dict(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
        "encoder and decoder",
    ),
    "mbart": Entry("MBartForConditionalGeneration", inputs="encoder and decoder"),
    "marian": Entry("MarianMTModel", inputs="encoder and decoder"),
    "m2m_100": Entry("M2M100ForConditionalGeneration", inputs="encoder and decoder"),
    "pegasus_x": Entry(
        "PegasusXForConditionalGeneration", dict(block_size=WINDOW, num_global_tokens=4), "encoder and decoder"
    ),
    "led": Entry("LEDForConditionalGeneration", dict(attention_window=[WINDOW, WINDOW]), "encoder and decoder"),
    "speech_to_text": Entry(
        "Speech2TextForConditionalGeneration",
        dict(conv_channels=32, input_feat_per_channel=16, max_source_positions=2048, max_target_positions=512),
        "speech to text",
    ),
    "moonshine": Entry("MoonshineForConditionalGeneration", MOONSHINE, "waveform to text"),
    "time_series_tf": Entry("TimeSeriesTransformerForPrediction", forecast, "series"),
    "informer": Entry("InformerForPrediction", forecast, "series"),
    "autoformer": Entry("AutoformerForPrediction", lambda n: dict(forecast(n), label_length=8), "series"),
    "patchtst": Entry(
        "PatchTSTModel",
        lambda n: dict(context_length=4 * n, patch_length=4, patch_stride=4, num_input_channels=2),
        "patches of series",
    ),
}  # fmt: skip

IMAGES = {
    "deit": Entry("DeiTModel", patches, "image"),
    "dinov3_vit": Entry("DINOv3ViTModel", patches, "image"),
    "vit_msn": Entry("ViTMSNModel", patches, "image"),
    "ijepa": Entry("IJepaModel", patches, "image"),
    "yolos": Entry(
        "YolosModel", lambda n: dict(patches(n), image_size=[square(n)] * 2, num_detection_tokens=8), "image of 64"
    ),
    "beit": Entry(
        "BeitModel", lambda n: dict(patches(n), use_relative_position_bias=True, out_indices=[1, 2]), "image"
    ),
    "swin": Entry("SwinModel", SWIN, "image"),
    "swinv2": Entry("Swinv2Model", SWIN, "image"),
    "donut_swin": Entry(
        "DonutSwinModel",
        dict(image_size=64, depths=[2, 2], num_heads=[2, 4], embed_dim=32, window_size=4),
        "image",
    ),
    "segformer": Entry("SegformerModel", PYRAMID, "image of 64"),
    "pvt_v2": Entry("PvtV2Model", dict(PYRAMID, image_size=64), "image of 64"),
    "videomae": Entry(
        "VideoMAEModel",
        lambda n: dict(image_size=32, patch_size=8, num_frames=max(2, 2 * (n // 16)), tubelet_size=2),
        "video",
    ),
    "vit_mae": Entry(
        "ViTMAEModel",
        lambda n: dict(
            patches(n), decoder_hidden_size=64, decoder_num_attention_heads=4, decoder_num_hidden_layers=2
        ),
        "image",
    ),
    "mobilevit": Entry(
        "MobileViTModel",
        dict(hidden_sizes=[32, 48, 64], neck_hidden_sizes=[8, 16, 16, 24, 24, 32, 64], image_size=128),
        "image",
    ),
    "mgp_str": Entry("MgpstrModel", dict(image_size=[32, 64], patch_size=8), "line of text"),
}  # fmt: skip

SOUNDS_AND_PAIRS = {
    "wav2vec2": Entry("Wav2Vec2Model", WAVES, "padded audio"),
    "unispeech": Entry("UniSpeechModel", WAVES, "audio"),
    "wavlm": Entry("WavLMModel", WAVES, "audio"),
    "wav2vec2_conformer": Entry("Wav2Vec2ConformerModel", dict(WAVES, position_embeddings_type="relative"), "audio"),
    "ast": Entry(
        "ASTModel",
        dict(max_length=128, num_mel_bins=32, patch_size=8, frequency_stride=8, time_stride=8),
        "spectrum",
    ),
    "vilt": Entry("ViltModel", dict(image_size=32, patch_size=8, max_image_length=-1), "text and pixels"),
    "lxmert": Entry("LxmertModel", dict(l_layers=1, x_layers=1, r_layers=1, visual_feat_dim=32), "text and regions"),
    "llava": Entry("LlavaForConditionalGeneration", LLAVA, "text with image"),
}

ENTRIES = {**DECODERS, **ENCODERS, **PAIRS, **IMAGES, **SOUNDS_AND_PAIRS}


def build(name: str, implementation: str, length: int) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    transformers.logging.set_verbosity_error()
    entry = ENTRIES[name]
    model_class = getattr(transformers, entry.model)
    sizes = entry.sizes(length) if callable(entry.sizes) else entry.sizes
    config = tiny(model_class.config_class, sizes)
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation=implementation), INPUTS[entry.inputs](length, config)
