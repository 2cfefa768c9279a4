"""Real models, tiny and with random weights: `build(name, length) -> (module, keyword arguments)`.

Dropout is off: everything here is compared number by number with the same program in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.harness.errors import worst_of

VOCAB, WIDTH = 61, 32
BATCH = 2

Built = tuple[nn.Module, dict[str, Any]]


def tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length))


def decoder_sizes(length: int) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * length, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def causal_lm(model: nn.Module, length: int) -> Built:
    ids = tokens(length)
    labels = ids.clone()
    labels[0, : length // 3] = -100  # ignored labels unevenly over the ranks: a mean of local means is wrong
    return model, dict(input_ids=ids, labels=labels)


def llama(length: int) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return causal_lm(LlamaForCausalLM(LlamaConfig(**decoder_sizes(length))), length)


def llama_padded(length: int) -> Built:
    model, inputs = llama(length)
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, -length // 4 :] = 0
    return model, {**inputs, "attention_mask": mask}


def mistral(length: int) -> Built:
    from transformers import MistralConfig, MistralForCausalLM

    return causal_lm(MistralForCausalLM(MistralConfig(**decoder_sizes(length), sliding_window=length // 3)), length)


def gpt2(length: int) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=2 * length, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return causal_lm(GPT2LMHeadModel(config), length)


def bert(length: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2 * length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[1, -length // 3 :] = 0
    return BertModel(config), dict(input_ids=tokens(length), attention_mask=mask)


def vit(length: int) -> Built:
    """17 tokens whatever `length` is: 16 patches and the class token."""
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTModel(config), dict(pixel_values=torch.randn(BATCH, 3, 32, 32))


def t5(length: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    mask = torch.ones(BATCH, length, dtype=torch.long)
    mask[0, -3:] = 0
    labels = tokens(length // 2 + 1)
    inputs = dict(input_ids=tokens(length), decoder_input_ids=labels.roll(1, 1), labels=labels, attention_mask=mask)
    return T5ForConditionalGeneration(config), inputs


class Float64Loss(nn.Module):
    """A language model with the loss of transformers, which casts the logits to float32, in the logits' own dtype."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, labels: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = "decoder_input_ids" in inputs
        wanted = labels if shifted else F.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = self.model(**inputs).logits
        return F.cross_entropy(logits.reshape(-1, VOCAB), wanted.reshape(-1), ignore_index=-100), logits


class Encoder(nn.Module):
    """nn.TransformerEncoder, with its own causal mask or without."""

    def __init__(self, causal: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype) if self.causal else None
        return self.layers(x, mask=mask, is_causal=self.causal)


def encoder(length: int) -> Built:
    return Encoder(False), dict(x=torch.randn(BATCH, length, WIDTH))


def encoder_causal(length: int) -> Built:
    return Encoder(True), dict(x=torch.randn(BATCH, length, WIDTH))


MODELS: dict[str, Callable[[int], Built]] = {
    make.__name__: make
    for make in (llama, llama_padded, mistral, gpt2, bert, vit, t5, encoder, encoder_causal)
}  # fmt: skip


def build(name: str, length: int, dtype: torch.dtype = torch.float32, own_loss: bool = False) -> Built:
    """The same weights and inputs on every call. In float64 the loss is computed in float64, but for `own_loss`."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, inputs = MODELS[name](length)
    floats = {key: x.to(dtype) for key, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    if dtype is torch.float64 and "labels" in inputs and not own_loss:
        model = Float64Loss(model)
    return model.to(dtype).train(), {**inputs, **floats}


def values(outputs: Any) -> list[torch.Tensor]:
    """Every floating tensor of what a model returns."""
    parts = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else (outputs,)
    return [part for part in parts if isinstance(part, torch.Tensor) and part.is_floating_point()]


def run(model: Any, parameters: nn.Module, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Outputs, then the gradient of every parameter; all outputs take part in the backward, unequally."""
    parameters.zero_grad()
    outputs = values(model(**inputs))
    weights = [torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape).to(out) for out in outputs]
    sum((out * weight).sum() / out.numel() for out, weight in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in parameters.parameters()]
    return [out.detach() for out in outputs] + [g if g is not None else torch.zeros(0) for g in gradients]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest error, relative to the largest entry of each value (tiny gradients: to 1e-4 of the largest
    gradient); infinite where it is not a number, which `max` would pass over."""
    assert [x.shape for x in found] == [x.shape for x in expected]
    floor = 1e-4 * max((float(x.abs().max()) for x in expected if x.numel()), default=0.0)
    errors = [
        float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), floor)
        for a, b in zip(found, expected, strict=True) if b.numel()
    ]  # fmt: skip
    return worst_of(0.0, *errors)
