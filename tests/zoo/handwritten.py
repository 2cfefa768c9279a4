"""Attention as people write it by hand, in a small pre-norm network: one function a spelling.

A spelling gets its module (for buffers and parameters), q, k, v [B, H, S, D] and the padding mask [B, S] (1: a token)
or None, and returns [B, H, S, D]. Names with `neg_` are no softmax attention over tokens, or use its weights elsewhere.
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

from tests.zoo.inputs import BATCH, normal, right_padded

WIDTH, HEADS, DEPTH, WINDOW = 64, 4, 16, 16
SCALE = DEPTH**-0.5

Spelling = Callable[["Attention", Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Entry:
    """`split`: how q, k, v come out of one projection; "apart": each has its own, K and V with `kv_heads` heads."""

    spelling: Spelling
    split: str = "apart"
    kv_heads: int = HEADS
    padded: bool = False


ENTRIES: dict[str, Entry] = {}


def spelled(**options: Any) -> Callable[[Spelling], Spelling]:
    def register(spelling: Spelling) -> Spelling:
        ENTRIES[spelling.__name__] = Entry(spelling, **options)
        return spelling

    return register


class Attention(nn.Module):
    def __init__(self, entry: Entry, length: int):
        super().__init__()
        self.entry = entry
        if entry.split == "apart":
            self.query = nn.Linear(WIDTH, WIDTH)
            self.key = nn.Linear(WIDTH, entry.kv_heads * DEPTH)
            self.value = nn.Linear(WIDTH, entry.kv_heads * DEPTH)
        else:
            self.all = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(0.1 * torch.randn(HEADS, length, length))
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.register_buffer("tril", torch.ones(length, length).tril().view(1, 1, length, length))
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.entry.spelling(self, *self.heads(x), mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def heads(self, x: Tensor) -> Any:
        """q, k, v, each [B, H, S, D]."""
        batch, length, _ = x.shape
        if self.entry.split == "apart":
            parts = [self.query(x), self.key(x), self.value(x)]
        elif self.entry.split == "chunk":
            parts = self.all(x).chunk(3, -1)
        elif self.entry.split == "split":
            parts = self.all(x).split(WIDTH, dim=2)
        else:
            stacked = self.all(x).reshape(batch, length, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
            return stacked.unbind(0) if self.entry.split == "unbind" else (stacked[0], stacked[1], stacked[2])
        return [part.view(batch, length, -1, DEPTH).transpose(1, 2) for part in parts]

    def unseen(self, length: int) -> Tensor:
        """True above the diagonal."""
        return self.tril[..., :length, :length] == 0


class Block(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.norm, self.attention, self.norm_after = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(self.norm_after(x))


class Network(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.ModuleList(Block(attention()) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


class OneHead(nn.Module):
    """Three dims, no heads, dropout on the weights: the attention of many papers' code."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(WIDTH), -1)
        return self.dropout(weights) @ self.value(x)


def build(name: str, length: int) -> tuple[nn.Module, dict[str, Tensor]]:
    x = {"x": normal(BATCH, length, WIDTH)}
    if name == "nano_single_head_3d":
        return Network(OneHead), x
    entry = ENTRIES[name]
    padding = {"mask": right_padded(length)} if entry.padded else {}
    return Network(lambda: Attention(entry, length)), {**x, **padding}


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) * SCALE


# ---- plain, in many products ---------------------------------------------------------------------------------------


@spelled()
def nano_matmul_div(module, q, k, v, mask):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(DEPTH), -1), v)


@spelled(split="split")
def nano_scale_q_before(module, q, k, v, mask):
    return ((q * SCALE) @ k.transpose(-1, -2)).softmax(dim=-1) @ v


@spelled(split="index")
def nano_no_scale(module, q, k, v, mask):
    return F.softmax(q @ k.mT, dim=-1) @ v


@spelled()
def nano_einsum_bhqd(module, q, k, v, mask):
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@spelled()
def nano_einsum_blhd(module, q, k, v, mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


@spelled()
def nano_bmm3d(module, q, k, v, mask):
    queries, keys, values = (x.reshape(-1, x.shape[2], DEPTH) for x in (q, k, v))
    weights = F.softmax(torch.bmm(queries, keys.transpose(1, 2)) * SCALE, -1)
    return torch.bmm(weights, values).view(q.shape)


@spelled()
def nano_softmax_fp32(module, q, k, v, mask):
    return F.softmax(scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


@spelled()
def nano_head_loop(module, q, k, v, mask):
    return torch.stack([scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(HEADS)], 1)


@spelled(kv_heads=2)
def nano_gqa_repeat_interleave(module, q, k, v, mask):
    k, v = (x.repeat_interleave(HEADS // 2, 1) for x in (k, v))
    return scores(q, k).softmax(-1) @ v


@spelled(kv_heads=1)
def nano_mqa_broadcast(module, q, k, v, mask):
    return scores(q, k).softmax(-1) @ v


@spelled()
def nano_manual_softmax(module, q, k, v, mask):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)) @ v


@spelled()
def nano_manual_softmax_late_norm(module, q, k, v, mask):
    s = scores(q, k)
    e = (s - s.amax(-1, keepdim=True).detach()).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


# ---- masked and biased ---------------------------------------------------------------------------------------------


@spelled(split="split")
def nano_causal_tril_fill(module, q, k, v, mask):
    s = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    return F.softmax(s.masked_fill(module.unseen(q.size(2)), float("-inf")), dim=-1) @ v


@spelled()
def nano_causal_where_min(module, q, k, v, mask):
    return torch.where(~module.unseen(q.size(2)), scores(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


@spelled()
def nano_causal_arange(module, q, k, v, mask):
    t = torch.arange(q.size(2))
    return scores(q, k).masked_fill(t[None, :] > t[:, None], -1e9).softmax(-1) @ v


@spelled()
def nano_baddbmm_causal(module, q, k, v, mask):
    queries, keys, values = (x.reshape(-1, x.shape[2], DEPTH) for x in (q, k, v))
    fill = torch.full((q.size(2), k.size(2)), -1e9, dtype=q.dtype).triu(1).expand(queries.size(0), -1, -1)
    s = torch.baddbmm(fill, queries, keys.transpose(1, 2), beta=1, alpha=SCALE)
    return torch.bmm(s.softmax(-1), values).view(q.shape)


@spelled()
def nano_alibi(module, q, k, v, mask):
    t = torch.arange(q.size(2))
    bias = module.slopes.view(1, HEADS, 1, 1) * (t[None, :] - t[:, None]).clamp(max=0)
    return (scores(q, k) + bias).masked_fill(module.unseen(q.size(2)), -1e9).softmax(-1) @ v


@spelled()
def nano_window(module, q, k, v, mask):
    t = torch.arange(q.size(2))
    back = t[:, None] - t[None, :]
    return scores(q, k).masked_fill(~((back >= 0) & (back < WINDOW)), float("-inf")).softmax(-1) @ v


@spelled()
def nano_mask_after_softmax_renorm(module, q, k, v, mask):
    weights = scores(q, k).softmax(-1) * module.tril[..., : q.size(2), : q.size(2)]
    return (weights / weights.sum(-1, keepdim=True)) @ v


@spelled()
def nano_learned_bias(module, q, k, v, mask):
    return (scores(q, k) + module.bias[:, : q.size(2), : k.size(2)]).softmax(-1) @ v


@spelled(padded=True)
def nano_padding_float_mask(module, q, k, v, mask):
    return (scores(q, k) + (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0).softmax(-1) @ v


@spelled(padded=True)
def nano_causal_and_padding(module, q, k, v, mask):
    hidden = module.unseen(q.size(2)) | (mask[:, None, None, :] == 0)
    return scores(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v


@spelled(padded=True)
def nano_nan_to_num(module, q, k, v, mask):
    weights = scores(q, k).masked_fill(mask[:, None, None, :] == 0, float("-inf")).softmax(-1)
    return torch.nan_to_num(weights) @ v


# ---- fused ---------------------------------------------------------------------------------------------------------


@spelled(split="split")
def nano_sdpa_causal(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelled(split="unbind")
def nano_sdpa_nomask(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v)


@spelled(kv_heads=2)
def nano_sdpa_gqa_flag(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@spelled(padded=True)
def nano_sdpa_boolmask_scale(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool(), scale=0.2)


@spelled(split="chunk")
def nano_sdpa_dropout(module, q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if module.training else 0.0, is_causal=True)


# ---- to be left alone ----------------------------------------------------------------------------------------------


@spelled()
def neg_linear_elu(module, q, k, v, mask):
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2)[..., None])


@spelled()
def neg_xca_channel(module, q, k, v, mask):
    """Channels attend to channels: the product runs over the tokens."""
    q, k = F.normalize(q, dim=-2), F.normalize(k, dim=-2)
    weights = (q.transpose(-1, -2) @ k * module.temperature).softmax(-1)
    return v @ weights.transpose(-1, -2)


@spelled()
def neg_relu_attention(module, q, k, v, mask):
    return F.relu(scores(q, k)) / q.size(2) @ v


@spelled()
def neg_topk_sparse(module, q, k, v, mask):
    s = scores(q, k)
    least = s.topk(8, -1).values[..., -1:]
    return s.masked_fill(s < least, float("-inf")).softmax(-1) @ v


@spelled()
def neg_attn_weights_used(module, q, k, v, mask):
    weights = scores(q, k).softmax(-1)
    return weights @ v + 0 * weights.mean()


@spelled()
def neg_retention(module, q, k, v, mask):
    return scores(q, k) * module.tril[..., : q.size(2), : q.size(2)] @ v


@spelled()
def neg_softmax_queries_axis(module, q, k, v, mask):
    """Normalized over the queries, not over the keys."""
    return scores(q, k).softmax(-2) @ v
