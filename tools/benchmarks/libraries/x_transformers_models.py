"""Decoders of x-transformers, one for each thing that can be switched on: in attentions ("attn_gate_values"), in
feed-forward layers ("ff_glu"), in the layers ("rotary_pos_emb") and around them ("use_cls_token")."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
import torch.nn as nn

from ringopt.tools.benchmarks.libraries.first_that_fits import Given, first_that_fits
from ringopt.tools.benchmarks.libraries.seeded import seeded

WORDS, TOKENS, WIDTH = 64, 64, 96
PARTS = {"AttentionLayers": "", "Attention": "attn_", "FeedForward": "ff_"}


def kinds() -> list[str]:
    """Every switch that is off by default."""
    code: Any = import_module("x_transformers.x_transformers")
    found = {prefix + switch for part, prefix in PARTS.items() for switch in _switches(getattr(code, part))}
    return sorted(found | {*_switches(code.TransformerWrapper)})


def _switches(part: Any) -> list[str]:
    return [p.name for p in inspect.signature(part.__init__).parameters.values() if p.default is False]


def build(name: str) -> tuple[nn.Module, Given]:
    """The model and the tokens of two samples. Raises where the switch asks for more than itself."""
    code: Any = import_module("x_transformers.x_transformers")
    around = {name: True} if name in _switches(code.TransformerWrapper) else {}
    within = {} if around else {name: True}

    def made() -> Any:
        layers = code.Decoder(**{"dim": WIDTH, "depth": 2, "heads": 4, "attn_dim_head": 8, **within})
        return code.TransformerWrapper(num_tokens=WORDS, max_seq_len=TOKENS, attn_layers=layers, **around)

    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (2, TOKENS), generator=dice)
    wide = torch.randn(2, TOKENS // 2, WIDTH, dtype=torch.float64, generator=dice)
    condition = torch.randn(2, WIDTH, dtype=torch.float64, generator=dice)
    model = seeded(made)
    return model, first_that_fits(model, {"x": [tokens], "context": [None, wide], "condition": [None, condition]})
