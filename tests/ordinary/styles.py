"""Attention of whole families of models, each in its own way beside softmax(q k) v."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.ordinary.model import HEADS, WIDTH, case, heads, labels_loss, merged, parameter


def triangle(n):
    return torch.ones(n, n, dtype=torch.bool).tril()


@case(gathered=("attention",), qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH), gate=lambda: nn.Linear(WIDTH, HEADS))
def forgetting_transformer(m, x, ids, lengths, labels):
    """Every rank has the running sums of the gates: a number for each head and key."""
    q, k, v = heads(m.qkv(x))
    kept = F.logsigmoid(m.gate(x)).transpose(1, 2).cumsum(-1)
    scores = q @ k.mT * 0.5 + kept[..., :, None] - kept[..., None, :]
    weights = scores.masked_fill(~triangle(x.size(1)), float("-inf")).softmax(-1)
    return labels_loss(m, merged(weights @ v), labels)


@case(actions=lambda: nn.Linear(WIDTH, WIDTH), rewards=lambda: nn.Linear(WIDTH, WIDTH))
def decision_transformer(m, x, ids, lengths, labels):
    """Three kinds of tokens take turns."""
    batch, n, _ = x.shape
    turns = torch.stack((m.rewards(x), x, m.actions(x)), 1).permute(0, 2, 1, 3).reshape(batch, 3 * n, WIDTH)
    y = m.second(turns).reshape(batch, n, 3, WIDTH).permute(0, 2, 1, 3)
    return labels_loss(m, y[:, 1], labels), y[:, 2]


@case(
    text=lambda: nn.Embedding(5, WIDTH),
    of_text=lambda: nn.Linear(WIDTH, 3 * WIDTH),
    of_rows=lambda: nn.Linear(WIDTH, 3 * WIDTH),
)
def joint_attention_of_text_and_image(m, x, ids, lengths, labels):
    text = m.text(ids[:, :5] % 5)
    parts = zip(heads(m.of_text(text)), heads(m.of_rows(x)), strict=True)
    y = merged(F.scaled_dot_product_attention(*(torch.cat(both, 2) for both in parts)))
    return labels_loss(m, x + y[:, 5:], labels), y[:, :5].mean(1)


@case(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH), gate=lambda: nn.Linear(WIDTH, 2))
def compressed_blocks_beside_a_window(m, x, ids, lengths, labels):
    q, k, v = heads(m.qkv(x))
    n, size = x.size(1), 3
    keys, values = (part.unflatten(2, (-1, size)).mean(3) for part in (k, v))
    i = torch.arange(n)
    past = torch.arange(n // size)[None] * size + size - 1 <= i[:, None]
    coarse = (q @ keys.mT * 0.5).masked_fill(~past, -1e9).softmax(-1).masked_fill(~past, 0) @ values
    near = (i[:, None] >= i) & (i[:, None] - i < 5)
    fine = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
    gate = m.gate(x).sigmoid().transpose(1, 2).unsqueeze(-1)
    return labels_loss(m, merged(coarse * gate[:, :1] + fine * gate[:, 1:]), labels)


@case(
    gathered=("einsum",), down=lambda: nn.Linear(WIDTH, 5 + 2), up=parameter(HEADS, 8, 5),
    query=lambda: nn.Linear(WIDTH, HEADS * 6), out=lambda: nn.Linear(HEADS * 4, WIDTH),
)  # fmt: skip
def latent_attention_absorbed(m, x, ids, lengths, labels):
    """DeepSeek-V2, 2.1.3: keys and values are never expanded from what is kept of them. Places have scores of their
    own, of which each rank makes its rows."""
    content, place = m.query(x).unflatten(-1, (HEADS, 6)).split([4, 2], -1)
    kept, of_place = m.down(x).split([5, 2], -1)
    content = torch.einsum("bshd,hdc->bshc", content, m.up[:, :4])
    scores = torch.einsum("bshc,btc->bsht", content, kept) + torch.einsum("bshr,btr->bsht", place, of_place)
    hidden = torch.full((x.size(1), x.size(1)), float("-inf")).triu(1).unsqueeze(1)
    seen = torch.einsum("bsht,btc->bshc", (scores * 0.4 + hidden).softmax(-1), kept)
    return labels_loss(m, m.out(torch.einsum("bshc,hdc->bshd", seen, m.up[:, 4:]).flatten(2)), labels)
