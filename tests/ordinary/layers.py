"""What stands between attentions: positions, tokens beside the sequence, pictures, scans."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.ordinary.model import HEADS, ROWS, WIDTH, WORDS, case, heads, labels_loss, merged, parameter


@case(scale=parameter(ROWS, 1), shift=parameter(ROWS, WIDTH))
def a_parameter_for_each_position(m, x, ids, lengths, labels):
    return labels_loss(m, m.second(x * m.scale + m.shift), labels)


@case(
    place_ids=lambda: torch.arange(64)[None],
    table=lambda: nn.Embedding(64, WIDTH),
    kinds=lambda: torch.zeros(1, 64, dtype=torch.long),
    kind=lambda: nn.Embedding(2, WIDTH),
)
def positions_and_kinds_of_bert(m, x, ids, lengths, labels):
    n = ids.shape[1]
    x = x + m.table(m.place_ids[:, :n]) + m.kind(m.kinds[:, :n].expand(ids.shape))
    return labels_loss(m, m.second(x), labels)


@case(table=lambda: nn.Embedding(64, WIDTH, padding_idx=1))
def positions_of_roberta(m, x, ids, lengths, labels):
    mask = ids.ne(1).int()
    place = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1
    return labels_loss(m, m.second(x + m.table(place)), labels)


@case(rel=lambda: nn.Embedding(2 * ROWS - 1, HEADS), qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def relative_position_bias(m, x, ids, lengths, labels):
    n = x.size(1)
    i = torch.arange(n)
    bias = m.rel(i[None] - i[:, None] + n - 1).permute(2, 0, 1)
    q, k, v = heads(m.qkv(x))
    y = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)) + bias).softmax(-1) @ v
    return labels_loss(m, merged(y), labels)


@case(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def rope_interleaved(m, x, ids, lengths, labels):
    n = x.size(1)
    q, k, v = heads(m.qkv(x))
    f = torch.outer(
        torch.arange(n, dtype=x.dtype),
        1 / 100 ** (torch.arange(0, WIDTH // HEADS, 2, dtype=x.dtype) / (WIDTH // HEADS)),
    )
    cos, sin = f.cos().repeat_interleave(2, -1), f.sin().repeat_interleave(2, -1)

    def turn(t):
        return torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)

    q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return labels_loss(m, merged(y), labels)


@case(rows=13, cls=parameter(1, 1, WIDTH))
def class_token_in_front(m, x, ids, lengths, labels):
    x = torch.cat((m.cls.expand(x.shape[0], -1, -1), x), dim=1)
    x = m.second(x)
    return F.cross_entropy(m.head(x[:, 0]), labels[:, 0]), x[:, 1:]


@case(memory=parameter(3, WIDTH))
def memory_tokens(m, x, ids, lengths, labels):
    mem = m.memory.unsqueeze(0).repeat(x.size(0), 1, 1)
    x = m.second(torch.cat([mem, x], 1))
    mem, x = x[:, :3], x[:, 3:]
    return labels_loss(m, x, labels) + mem.square().mean(), mem


@case(
    rows=16,
    gathered=("view",),
    reduce=lambda: nn.Linear(4 * WIDTH, WIDTH, bias=False),
    norm=lambda: nn.LayerNorm(4 * WIDTH),
)
def patch_merging_of_swin(m, x, ids, lengths, labels):
    b, _, c = x.shape
    g = x.view(b, 4, 4, c)
    parts = [g[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    x = m.reduce(m.norm(torch.cat(parts, -1).view(b, -1, 4 * c)))
    x = m.second(x)
    return F.cross_entropy(m.head(x.mean(1)), labels[:, 0])


@case(rows=16, gathered=("pixel_shuffle",), up=lambda: nn.Linear(WIDTH, 4 * WIDTH))
def pixel_shuffle_decoder(m, x, ids, lengths, labels):
    b, _, c = x.shape
    g = m.up(m.second(x)).transpose(1, 2).reshape(b, 4 * c, 4, 4)
    return F.pixel_shuffle(g, 2).square().mean()


@case(rows=16, gathered=("view",), qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def windows_shifted(m, x, ids, lengths, labels):
    b, n, c = x.shape
    g = torch.roll(x.view(b, 4, 4, c), (-1, -1), (1, 2))
    w = g.view(b, 2, 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    q, k, v = heads(m.qkv(w))
    w = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, 4, c)
    g = w.view(b, 2, 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(b, 4, 4, c)
    x = torch.roll(g, (1, 1), (1, 2)).view(b, n, c) + x
    return m.second(x).square().mean()


@case(
    rows=10,
    gathered=("conv_transpose1d",),
    up=lambda: nn.ConvTranspose1d(WIDTH, WIDTH, 2, 2),
    down=lambda: nn.Conv1d(WIDTH, WIDTH, 3, 2, 1),
)
def u_net(m, x, ids, lengths, labels):
    y = m.down(x.transpose(1, 2))
    y = m.second(y.transpose(1, 2)).transpose(1, 2)
    y = m.up(y).transpose(1, 2)
    return labels_loss(m, x + y, labels)


@case(short=lambda: nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH, padding=3), gate=lambda: nn.Linear(WIDTH, WIDTH))
def gated_short_convolution(m, x, ids, lengths, labels):
    y = m.short(x.transpose(1, 2))[..., : x.size(1)].transpose(1, 2)
    return labels_loss(m, m.second(F.silu(y) * m.gate(x).sigmoid()), labels)


@case(mix=parameter(WIDTH))
def token_shift_of_rwkv(m, x, ids, lengths, labels):
    before = F.pad(x, (0, 0, 1, -1))
    return labels_loss(m, m.second(x * m.mix + before * (1 - m.mix)), labels)


@case(a=parameter(WIDTH), b=lambda: nn.Linear(WIDTH, 4), c=lambda: nn.Linear(WIDTH, 4))
def selective_scan(m, x, ids, lengths, labels):
    b, n, d = x.shape
    delta = F.softplus(x)
    B_, C = m.b(x), m.c(x)
    h, ys = x.new_zeros(b, d, 4), []
    for t in range(n):
        h = (
            torch.exp(-delta[:, t, :, None] * m.a.exp()[:, None]) * h
            + delta[:, t, :, None] * B_[:, t, None] * x[:, t, :, None]
        )
        ys.append((h * C[:, t, None]).sum(-1))
    return labels_loss(m, m.second(torch.stack(ys, dim=1)), labels)


@case(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def linear_attention_causal(m, x, ids, lengths, labels):
    q, k, v = m.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    kv = torch.einsum("bnd,bne->bnde", k, v).cumsum(1)
    z = 1 / (torch.einsum("bnd,bnd->bn", q, k.cumsum(1)) + 1e-06)
    return labels_loss(m, m.second(torch.einsum("bnd,bnde,bn->bne", q, kv, z)), labels)


@case(rnn=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True))
def gru_on_top(m, x, ids, lengths, labels):
    y, _ = m.rnn(m.second(x))
    return labels_loss(m, y, labels)


@case(cross=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), target=lambda: nn.Embedding(WORDS, WIDTH))
def encoder_and_decoder(m, x, ids, lengths, labels):
    memory = m.second(x)
    y = m.first(m.target(F.pad(ids[:, :-1], (1, 0), value=1)))
    y = y + m.cross(y, memory, memory, need_weights=False)[0]
    return labels_loss(m, y, labels)


@case(rows=13)
def two_towers(m, x, ids, lengths, labels):
    text, picture = x[:, :5], x[:, 5:]
    text, picture = m.second(text), m.first(picture)
    both = m.second(torch.cat([text, picture], 1))
    a, b = both.split([5, both.size(1) - 5], dim=1)
    return F.cosine_similarity(a.mean(1), b.mean(1)).sum(), (a, {"picture": b})


@case(gathered=("conv1d",), spatial=lambda: nn.Conv1d(ROWS, ROWS, 1), norm=lambda: nn.LayerNorm(WIDTH // 2))
def gated_mlp_over_tokens(m, x, ids, lengths, labels):
    u, v = x.chunk(2, -1)
    y = u * m.spatial(m.norm(v))
    return labels_loss(m, m.second(torch.cat([y, u], -1)), labels)


@case()
def adaptive_norm_by_condition(m, x, ids, lengths, labels):
    c = m.words(ids[:, 0])
    return labels_loss(m, m.second(F.layer_norm(x, (WIDTH,)) * (1 + c[:, None]) + c[:, None]), labels)


@case(bilinear=lambda: nn.Bilinear(WIDTH, WIDTH, 3))
def bilinear_of_neighbours(m, x, ids, lengths, labels):
    h = m.second(x)
    return m.bilinear(h[:, 1:].contiguous(), h[:, :-1].contiguous()).square().mean()


@case(rows=12)
def strided_queries(m, x, ids, lengths, labels):
    q, k = x[:, ::3], x
    s = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).softmax(-1)
    return m.second(s @ k).square().mean()


@case(rows=12)
def block_local_attention(m, x, ids, lengths, labels):
    b, n, d = x.shape
    w = x.view(b, n // 4, 4, d)
    prev = F.pad(w, (0, 0, 0, 0, 1, 0))[:, :-1]
    k = torch.cat([prev, w], 2)
    s = (w @ k.transpose(-1, -2)).softmax(-1)
    return labels_loss(m, m.second((s @ k).view(b, n, d)), labels)


@case(rel=parameter(2 * ROWS - 1, WIDTH // HEADS), qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def relative_keys_skewed(m, x, ids, lengths, labels):
    b, n, _ = x.shape
    q, k, v = heads(m.qkv(x))
    s = q @ m.rel[:n].T
    s = F.pad(s, (1, 0)).view(b, HEADS, n + 1, n)[:, :, 1:]
    y = ((q @ k.mT + s) / 2).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1) @ v
    return labels_loss(m, merged(y), labels)
