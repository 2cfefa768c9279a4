"""Private functions behind torch.nn."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ringopt.torch_compat.nn import CANONICAL_MASK, DETECT_IS_CAUSAL_MASK, ENCODER_LAYER, MULTI_HEAD_ATTENTION


def test_the_arguments_that_stand_ins_take() -> None:
    assert list(inspect.signature(DETECT_IS_CAUSAL_MASK).parameters) == ["mask", "is_causal", "size"]
    names = ["mask", "mask_name", "other_type", "other_name", "target_type", "check_other"]
    assert list(inspect.signature(CANONICAL_MASK).parameters) == names


def test_a_mask_of_bools_becomes_numbers() -> None:
    made = CANONICAL_MASK(torch.tensor([True, False]), "m", None, "", torch.float32)
    assert made.tolist() == [-torch.inf, 0.0]
    assert CANONICAL_MASK(None, "m", None, "", torch.float32) is None


def test_a_causal_mask_is_known_by_its_numbers() -> None:
    assert DETECT_IS_CAUSAL_MASK(nn.Transformer.generate_square_subsequent_mask(3))
    assert not DETECT_IS_CAUSAL_MASK(torch.zeros(3, 3))


def test_the_fused_layer_takes_what_the_module_holds() -> None:
    module, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 3, 8)
    attention, first, second = module.self_attn, module.norm1, module.norm2
    held = (attention.in_proj_weight, attention.in_proj_bias, attention.out_proj.weight, attention.out_proj.bias)
    norms = (first.weight, first.bias, second.weight, second.bias)
    layers = (module.linear1.weight, module.linear1.bias, module.linear2.weight, module.linear2.bias)
    with torch.no_grad():
        found = ENCODER_LAYER(x, 8, 2, *held, False, False, first.eps, *norms, *layers, None, None)
    torch.testing.assert_close(found, module(x))


def test_the_fused_attention_takes_what_the_module_holds() -> None:
    module, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 3, 8)
    hidden = torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        held = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
        found = MULTI_HEAD_ATTENTION(x, x, x, 8, 2, *held, hidden, True, True, 1)
    torch.testing.assert_close(found, module(x, x, x, key_padding_mask=hidden))
