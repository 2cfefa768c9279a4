"""The masks that transformers and torch.nn build: read under the right name, equal block by block."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import transformers

from ringopt.expr.mask import ScoreBlock
from ringopt.ir.nodes import shape_of
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from ringopt.passes.strip_repeat_kv import StripRepeatKv
from tests.harness.capturing import after
from tests.harness.masks import assert_same_mask, classified

B, N, DECODED = 2, 20, 14
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
IDS = torch.arange(B * N).view(B, N) % 60 + 3
RIGHT = torch.ones(B, N, dtype=torch.int64)
RIGHT[1, 15:] = 0
LEFT = RIGHT.flip(1)
POSITIONS = torch.cat([torch.arange(9), torch.arange(11)]).expand(B, N).contiguous()
WHOLE = torch.ones(N, N).tril().bool().expand(B, 1, N, N).contiguous()


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False))


def mistral():
    config = transformers.MistralConfig(**SMALL, num_key_value_heads=2, use_cache=False, sliding_window=6)
    return transformers.MistralForCausalLM(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL)).eval()


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return transformers.GPT2Model(config).eval()


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, use_cache=False, decoder_start_token_id=0
    )
    return transformers.T5Model(config).eval()


ENCODER = "encoder.block.0.layer.0.self_attention.relative_attention_bias.weight"
DECODER = ENCODER.replace("encoder", "decoder")
DECODED_IDS = {"decoder_input_ids": IDS[:, :DECODED]}

#: name -> (model, keywords, the names of the masks of its first block, in order)
MODELS = {
    "llama": (llama, {}, ["causal"]),
    "llama, right padding": (llama, {"attention_mask": RIGHT}, ["causal & padding(attention_mask)"]),
    "llama, left padding": (llama, {"attention_mask": LEFT}, ["causal & padding(attention_mask)"]),
    "llama, packed": (llama, {"position_ids": POSITIONS}, ["order(position_ids) & documents(position_ids)"]),
    "llama, a mask of its own": (llama, {"attention_mask": WHOLE}, ["stored"]),
    "mistral": (mistral, {}, ["window(6)"]),
    "mistral, padding": (mistral, {"attention_mask": LEFT}, ["window(6) & padding(attention_mask)"]),
    "bert": (bert, {}, ["full"]),
    "bert, padding": (bert, {"attention_mask": RIGHT}, ["padding(attention_mask)"]),
    "gpt2": (gpt2, {}, ["causal"]),
    "gpt2, padding": (gpt2, {"attention_mask": RIGHT}, ["causal & padding(attention_mask)"]),
    "t5": (t5, DECODED_IDS, [f"bias(learned: {ENCODER})", f"causal & bias(learned: {DECODER})", "full"]),
    "t5, padding": (
        t5, DECODED_IDS | {"attention_mask": RIGHT},
        [f"bias(learned: {ENCODER}; attention_mask)", f"causal & bias(learned: {DECODER})", "bias(attention_mask)"],
    ),
}  # fmt: skip


# Without padding they show nothing that the same model with it, or Llama, does not.
ALSO = ("mistral", "gpt2", "t5")


@pytest.mark.sample(24)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.zoo] if name in ALSO else []) for name in MODELS]
)
def test_masks_of_transformers(name):
    make, kwargs, names = MODELS[name]
    torch.manual_seed(0)
    sites, context = classified(make(), {"input_ids": IDS, **kwargs})
    assert not any(info.refusal for info in context.sites.values())
    assert [name for name in dict.fromkeys(site.info.pattern for site in sites) if name] == names
    for site in sites:
        assert_same_mask(site)
        assert all(shape_of(source)[-2:] != (N, N) for source in site.node.args[4]) or "own" in name


def test_gradient_of_a_learned_bias_is_the_sum_over_blocks():
    """T5's table of 32 buckets x 4 heads: over the blocks of all ranks and steps as over the whole mask."""
    torch.manual_seed(0)
    sites, _context = classified(t5(), {"input_ids": IDS, **DECODED_IDS})
    site = sites[0]
    (table,) = site.sources
    table = table.detach().double().requires_grad_()
    b, h, q, k = site.sizes
    upstream = torch.randn(b, h, q, k, dtype=torch.float64)
    whole = site.mask.additive(ScoreBlock(b, h, range(q), range(k)), [table], torch.float64)
    (expected,) = torch.autograd.grad((whole * upstream).sum(), table)
    rows = [torch.tensor([row for row in range(q) if row // 3 % 4 in (rank, 3 - rank)]) for rank in range(2)]  # zigzag
    total = torch.zeros_like(table)
    for mine in rows:
        for keys in rows:
            block = site.mask.additive(ScoreBlock(b, h, mine, keys), [table], torch.float64)
            total += torch.autograd.grad((block * upstream[:, :, mine][..., keys]).sum(), table)[0]
    assert site.mask.differentiable == (0,) and expected.abs().sum() > 0
    assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)


class MultiheadAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, padding=None):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]


def infinite(padding):
    return torch.zeros(padding.shape).masked_fill(padding == 0, -math.inf)


@pytest.mark.parametrize(
    ("padding", "name"), [(None, "causal"), (infinite(RIGHT), "causal & bias(padding)")], ids=["plain", "padded"]
)
def test_masks_of_multihead_attention(padding, name):
    (site,), _context = classified(MultiheadAttention(), torch.randn(B, N, 32), *([] if padding is None else [padding]))
    assert_same_mask(site)
    assert site.info.pattern == name


@pytest.mark.zoo
@pytest.mark.parametrize("name", ["llama, left padding", pytest.param("mistral", marks=pytest.mark.zoo), "t5, padding"])
def test_graph_gives_the_same_numbers_and_gradients(name):
    make, kwargs, _names = MODELS[name]
    torch.manual_seed(0)
    module, passes = make(), (Normalize(), FindAttention(), StripRepeatKv(), ClassifyMask())
    gm, _context = after(passes, module, {"input_ids": IDS, **kwargs})
    inputs = gm.meta["inputs"]
    found = [x for x in gm(*inputs) if x.is_floating_point() and x.requires_grad]
    reference = module(input_ids=IDS, **kwargs)
    expected = [reference[key] for key in ("logits", "last_hidden_state") if key in reference]
    expected = [out for out in expected if out.shape == found[0].shape]
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    weights = [x for x in inputs if x.requires_grad]
    grads = [torch.autograd.grad(out.sin().sum(), weights, allow_unused=True) for out in (found[0], expected[0])]
    for left, right in zip(*grads, strict=True):
        assert (left is None and right is None) or torch.allclose(left, right, atol=1e-4)
