"""Models of torchaudio, tiny: a table of what each is made of, for their constructors have few defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ringopt.tools.benchmarks.libraries.first_that_fits import Given
from ringopt.tools.benchmarks.libraries.seeded import normal, seeded

BATCH, FRAMES, FEATURES, WORDS = 2, 64, 16, 12
LENGTHS = torch.tensor([FRAMES, FRAMES - 20])


def _words(length: int) -> Tensor:
    return torch.arange(BATCH * length).reshape(BATCH, length) % WORDS


WAV2VEC2: dict[str, Any] = {
    "extractor_mode": "group_norm", "extractor_conv_layer_config": [(16, 10, 5), (16, 3, 2), (16, 2, 2)],
    "extractor_conv_bias": False, "encoder_embed_dim": 32, "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 8, "encoder_pos_conv_groups": 2, "encoder_num_layers": 2, "encoder_num_heads": 4,
    "encoder_attention_dropout": 0.0, "encoder_ff_interm_features": 48, "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0, "encoder_layer_norm_first": False, "encoder_layer_drop": 0.0, "aux_num_out": WORDS,
}  # fmt: skip
WAVE = normal(BATCH, 1_300)

# The constructor, what it is given, and what its model is.
MODELS: dict[str, tuple[dict[str, Any], Callable[[], Given]]] = {
    "Conformer": (
        {"input_dim": 32, "num_heads": 4, "ffn_dim": 48, "num_layers": 2, "depthwise_conv_kernel_size": 7},
        lambda: {"input": normal(BATCH, FRAMES, 32), "lengths": LENGTHS},
    ),
    "ConvTasNet": (
        {"enc_num_feats": 16, "msk_num_feats": 8, "msk_num_hidden_feats": 16, "msk_num_layers": 3, "msk_num_stacks": 2},
        lambda: {"input": normal(BATCH, 1, 640)},
    ),
    "DeepSpeech": ({"n_feature": FEATURES, "n_hidden": 32}, lambda: {"x": normal(BATCH, 1, FRAMES, FEATURES)}),
    "Emformer": (
        {"input_dim": 32, "num_heads": 4, "ffn_dim": 48, "num_layers": 2, "segment_length": 8,
         "left_context_length": 8, "right_context_length": 4},
        lambda: {"input": normal(BATCH, FRAMES + 4, 32), "lengths": LENGTHS},
    ),
    "HDemucs": (
        {"sources": ["voice", "rest"], "audio_channels": 1, "channels": 8, "nfft": 1024, "depth": 5},
        lambda: {"input": normal(BATCH, 1, 4_096)},
    ),
    "Tacotron2": (
        {"n_mels": FEATURES, "n_symbol": WORDS, "symbol_embedding_dim": 32, "encoder_embedding_dim": 32,
         "attention_rnn_dim": 32, "attention_hidden_dim": 32, "decoder_rnn_dim": 32, "prenet_dim": 32,
         "postnet_embedding_dim": 32, "decoder_max_step": 16},
        lambda: {"tokens": _words(24), "token_lengths": torch.tensor([24, 20]),
                 "mel_specgram": normal(BATCH, FEATURES, 16), "mel_specgram_lengths": torch.tensor([16, 12])},
    ),
    "Wav2Letter": (
        {"num_classes": WORDS, "input_type": "mfcc", "num_features": FEATURES},
        lambda: {"x": normal(BATCH, FEATURES, FRAMES * 2)},
    ),
    "WaveRNN": (
        {"upsample_scales": [2, 4], "n_classes": WORDS, "hop_length": 8, "n_res_block": 2, "n_rnn": 16, "n_fc": 16,
         "n_freq": FEATURES, "n_hidden": 16, "n_output": 16},
        lambda: {"waveform": normal(BATCH, 1, 8 * 12), "specgram": normal(BATCH, 1, FEATURES, 16)},
    ),
    "emformer_rnnt_model": (
        {"input_dim": FEATURES, "encoding_dim": 32, "num_symbols": WORDS, "segment_length": 8,
         "right_context_length": 4, "time_reduction_input_dim": 16, "time_reduction_stride": 4,
         "transformer_num_heads": 4, "transformer_ffn_dim": 48, "transformer_num_layers": 2,
         "transformer_dropout": 0.0, "transformer_activation": "gelu", "transformer_left_context_length": 8,
         "transformer_max_memory_size": 0, "transformer_weight_init_scale_strategy": "depthwise",
         "transformer_tanh_on_mem": True, "symbol_embedding_dim": 16, "num_lstm_layers": 1,
         "lstm_layer_norm": True, "lstm_layer_norm_epsilon": 1e-3, "lstm_dropout": 0.0},
        lambda: {"sources": normal(BATCH, FRAMES + 16, FEATURES), "source_lengths": LENGTHS,
                 "targets": _words(10).int(), "target_lengths": torch.tensor([10, 8])},
    ),
    "wav2vec2_model": (WAV2VEC2, lambda: {"waveforms": WAVE}),
    "wavlm_model": (
        WAV2VEC2 | {"encoder_num_buckets": 16, "encoder_max_distance": 32},
        lambda: {"waveforms": WAVE},
    ),
}  # fmt: skip


def kinds() -> list[str]:
    """The names of constructors in `torchaudio.models`."""
    import_module("torchaudio.models")
    return sorted(MODELS)


def build(name: str) -> tuple[nn.Module, Given]:
    """The model and a batch of sounds, features or words."""
    warnings.simplefilter("ignore")
    make: Any = getattr(import_module("torchaudio.models"), name)
    sizes, given = MODELS[name]
    return seeded(make, **sizes), given()
