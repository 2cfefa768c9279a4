"""The spellings of one attention that people write: `FORMS`, and `LOOKALIKES` that are none.

Each is a function of q [B, H, S, D], k and v (fewer heads where it groups them; k transposed where it says so).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, KV_HEADS, LENGTH, DEPTH = 2, 4, 2, 13, 8
SCALE = 1 / math.sqrt(DEPTH)

Call = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """`in_float32`: the softmax is, whatever q is."""

    call: Call
    fused: bool = False
    grouped: bool = False
    keys_transposed: bool = False
    dropout: bool = False
    in_float32: bool = False


FORMS: dict[str, Form] = {}
LOOKALIKES: dict[str, Form] = {}


def _form(table: dict[str, Form] = FORMS, **facts: bool) -> Callable[[Call], Call]:
    def register(call: Call) -> Call:
        table[call.__name__] = Form(call, **facts)
        return call

    return register


class Spelled(nn.Module):
    """A form as a program; dropout follows `training`."""

    def __init__(self, name: str):
        super().__init__()
        self.form = (FORMS | LOOKALIKES)[name]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.form.call(q, k, v) if not self.form.dropout else self.form.call(q, k, v, self.training)


def inputs(name: str, dtype: torch.dtype = torch.float64, requires_grad: bool = True) -> list[Tensor]:
    """Random q, k, v of a spelling, [B, H, S, D] unless it takes its keys transposed."""
    shape = (FORMS | LOOKALIKES)[name]
    heads = KV_HEADS if shape.grouped else HEADS
    keys = (DEPTH, LENGTH) if shape.keys_transposed else (LENGTH, DEPTH)
    sizes = [(BATCH, HEADS, LENGTH, DEPTH), (BATCH, heads, *keys), (BATCH, heads, LENGTH, DEPTH)]
    made = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=made, dtype=dtype).requires_grad_(requires_grad) for size in sizes]


def causal(q: Tensor) -> Tensor:
    """0 on and below the diagonal, -inf above."""
    return torch.full((LENGTH, LENGTH), float("-inf"), dtype=q.dtype).triu(1)


def _lower_triangle() -> Tensor:
    return torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def _merged_heads(*operands: Tensor) -> list[Tensor]:
    return [x.reshape(BATCH * HEADS, LENGTH, DEPTH) for x in operands]


# ---- where the scale stands ----------------------------------------------------------------------------------------


@_form()
def div_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores divided by sqrt(D)."""
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(DEPTH), -1)
    return torch.matmul(weights, v)


@_form()
def mul_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores multiplied by the scale, softmax as a method."""
    return torch.matmul((torch.matmul(q, k.transpose(-2, -1)) * SCALE).softmax(-1), v)


@_form()
def scale_q_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale on q, before the product."""
    return ((q * SCALE) @ k.transpose(-2, -1)).softmax(-1) @ v


@_form()
def scale_k_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The scale on k, before the product."""
    return (q @ (k * SCALE).transpose(-2, -1)).softmax(-1) @ v


@_form()
def scale_both_sqrt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The root of the scale on q and on k, as Megatron and Whisper have it."""
    part = math.sqrt(SCALE)
    return ((q * part) @ (k.transpose(-2, -1) * part)).softmax(-1) @ v


@_form()
def no_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores without a scale."""
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


# ---- masks, biases, and what else happens to scores ----------------------------------------------------------------


@_form()
def add_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask of 0 and -inf that is added."""
    return (q @ k.transpose(-2, -1) / math.sqrt(DEPTH) + causal(q)).softmax(-1) @ v


@_form()
def mask_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask by masked_fill with -inf."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(DEPTH)
    return scores.masked_fill(~_lower_triangle(), float("-inf")).softmax(-1) @ v


@_form()
def mask_where(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A causal mask by where, with the smallest finite number."""
    scores = q @ k.transpose(-2, -1) * SCALE
    return torch.where(_lower_triangle(), scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


@_form(in_float32=True)
def softmax_fp32_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax in float32, cast back to the dtype of q."""
    scores = q @ k.transpose(2, 3) * SCALE + causal(q)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


@_form(in_float32=True)
def t5_bias_noscale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A bias by relative position on unscaled scores, as T5 has it (Raffel et al. 2020)."""
    places = torch.arange(LENGTH, dtype=q.dtype)
    bias = 0.1 * (places[None, :] - places[:, None]).abs() * torch.arange(1, HEADS + 1).view(1, HEADS, 1, 1)
    scores = q @ k.transpose(3, 2) + (bias + causal(q))
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return F.dropout(weights, p=0.0, training=True) @ v


@_form()
def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores capped by tanh, as Gemma 2 has them."""
    scores = torch.tanh(q @ k.transpose(-2, -1) * SCALE / 30.0) * 30.0
    return (scores + causal(q)).softmax(-1) @ v


@_form()
def sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One more column takes weight and gives nothing."""
    scores = q @ k.transpose(-2, -1) * SCALE + causal(q)
    sink = torch.linspace(-1, 1, HEADS, dtype=q.dtype).view(1, HEADS, 1, 1).expand(BATCH, HEADS, LENGTH, 1)
    return torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1] @ v


@_form(dropout=True)
def dropout_train(q: Tensor, k: Tensor, v: Tensor, training: bool) -> Tensor:
    """Dropout of the attention probabilities."""
    weights = (q @ k.transpose(-2, -1) / math.sqrt(DEPTH)).softmax(-1)
    return F.dropout(weights, 0.1, training) @ v


@_form()
def manual_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax spelled out: maximum, exp, sum, division."""
    scores = q @ k.transpose(-2, -1) * SCALE + causal(q)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


@_form()
def returns_weights(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The attention probabilities as a second output."""
    weights = (q @ k.transpose(-2, -1) / math.sqrt(DEPTH)).softmax(-1)
    return weights @ v, weights


# ---- products and layouts ------------------------------------------------------------------------------------------


@_form()
def einsum_bhqk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both products as einsum, operands B H S D."""
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(DEPTH)).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@_form()
def einsum_bqhd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both products as einsum, operands B S H D."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(BATCH, LENGTH, HEADS * DEPTH)


@_form()
def bmm_3d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both products as bmm, heads merged into the batch."""
    q, k, v = _merged_heads(q, k, v)
    weights = (torch.bmm(q, k.transpose(1, 2)) / math.sqrt(DEPTH)).softmax(-1)
    return torch.bmm(weights, v).view(BATCH, HEADS, LENGTH, DEPTH)


@_form()
def baddbmm_alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores by baddbmm onto the bias of ALiBi (Press et al. 2022), as BLOOM has them."""
    q, k, v = _merged_heads(q, k, v)
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype).repeat(BATCH)
    bias = slopes[:, None, None] * torch.arange(LENGTH, dtype=q.dtype)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=SCALE)
    return torch.bmm((scores + causal(q)).softmax(-1), v)


@_form(keys_transposed=True)
def k_pretransposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys that come as B H D S."""
    return (q @ k / math.sqrt(DEPTH)).softmax(-1) @ v


@_form(grouped=True)
def gqa_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """KV heads repeated for the queries of their group (GQA)."""
    group = HEADS // KV_HEADS
    k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).reshape(BATCH, HEADS, LENGTH, DEPTH) for x in (k, v))
    return (q @ k.transpose(2, 3) * SCALE + causal(q)).softmax(-1) @ v


@_form(grouped=True)
def gqa_5d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """GQA with queries as B KV_HEADS GROUP S D, KV heads broadcast."""
    queries = q.reshape(BATCH, KV_HEADS, HEADS // KV_HEADS, LENGTH, DEPTH)
    weights = (queries @ k[:, :, None].transpose(-1, -2) * SCALE).softmax(-1)
    return (weights @ v[:, :, None]).reshape(BATCH, HEADS, LENGTH, DEPTH)


@_form()
def bert_permute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads split and joined by view and permute, as BERT of transformers has them."""
    joined = [x.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * DEPTH) for x in (q, k, v)]
    q, k, v = (x.view(BATCH, LENGTH, HEADS, DEPTH).permute(0, 2, 1, 3) for x in joined)
    weights = F.softmax(q @ k.transpose(-1, -2) / math.sqrt(DEPTH) + causal(q), -1)
    return (weights @ v).permute(0, 2, 1, 3).contiguous().view(BATCH, LENGTH, HEADS * DEPTH)


@_form()
def scores_transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keys by queries, normalized over the keys all the same."""
    weights = (k @ q.transpose(-2, -1) * SCALE).softmax(dim=-2)
    return weights.transpose(-2, -1) @ v


@_form()
def single_head_3d(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head, operands B S D."""
    q, k, v = (x[:, 0] for x in (q, k, v))
    return (q @ k.transpose(-2, -1) / math.sqrt(DEPTH)).softmax(-1) @ v


# ---- fused ---------------------------------------------------------------------------------------------------------


@_form(fused=True)
def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """scaled_dot_product_attention with is_causal."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@_form(fused=True)
def sdpa_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """scaled_dot_product_attention with a bool mask."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_lower_triangle())


# ---- no attention over tokens --------------------------------------------------------------------------------------


@_form(LOOKALIKES)
def weights_without_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax of scores that is multiplied with no values: no attention."""
    return (q @ k.transpose(-2, -1)).softmax(-1).square().sum(-1)


@_form(LOOKALIKES)
def channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The products run over the tokens; channels attend to channels."""
    weights = (q.transpose(-2, -1) @ k / 10.0).softmax(-1)
    return weights @ v.transpose(-2, -1)


@_form(LOOKALIKES)
def router(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each token chooses among LENGTH experts, which are weights and no tokens."""
    gates = (q @ k[0, 0].T).softmax(-1)
    return gates @ v[0, 0]


@_form(LOOKALIKES)
def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The weights of a key sum to one, those of a query do not."""
    return (q @ k.transpose(-2, -1) * SCALE).softmax(-2) @ v
