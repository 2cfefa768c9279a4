"""Rows that are routed, counted, packed, masked; buffers that remember them."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.ordinary.model import ROWS, WIDTH, case, heads, labels_loss, merged, parameter


@case(router=lambda: nn.Linear(WIDTH, 4), up=parameter(4, WIDTH, WIDTH), down=parameter(4, WIDTH, WIDTH))
def experts_by_top_k(m, x, ids, lengths, labels):
    flat = x.reshape(-1, WIDTH)
    probs = m.router(flat).softmax(-1)
    w, chosen = probs.topk(2, dim=-1)
    w = w / w.sum(-1, keepdim=True)
    gate = torch.zeros_like(probs).scatter(1, chosen, w)
    y = torch.einsum("nd,edf->nef", flat, m.up).relu()
    y = torch.einsum("nef,efd,ne->nd", y, m.down, gate)
    share = F.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
    aux = 4 * (share * probs.mean(0)).sum() + m.router(flat).logsumexp(-1).square().mean() * 0.001
    return labels_loss(m, m.second(x + y.view(x.shape)), labels) + aux


@case(router=lambda: nn.Linear(WIDTH, 3), experts=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
def experts_of_mixtral(m, x, ids, lengths, labels):
    flat = x.view(-1, WIDTH)
    w, chosen = m.router(flat).softmax(-1).topk(2, -1)
    out = torch.zeros_like(flat)
    mask = F.one_hot(chosen, 3).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        k, at = torch.where(mask[e])
        out.index_add_(0, at, expert(flat[at]) * w[at, k, None])
    return labels_loss(m, m.second(x + out.view(x.shape)), labels)


@case(router=lambda: nn.Linear(WIDTH, 3), experts=parameter(3, WIDTH, WIDTH))
def experts_with_capacity(m, x, ids, lengths, labels):
    flat = x.flatten(0, 1)
    probs = m.router(flat).softmax(-1)
    p, e = probs.max(-1)
    one = F.one_hot(e, 3)
    place = (one.cumsum(0) * one).sum(-1) - 1
    keep = place < 6
    dispatch = (one * keep[:, None])[..., None] * F.one_hot(place.clamp(max=5), 6)[:, None]
    into = torch.einsum("nec,nd->ecd", dispatch.to(x.dtype), flat)
    out = torch.einsum("ecd,edf->ecf", into, m.experts)
    y = torch.einsum("nec,ecf->nf", dispatch.to(x.dtype), out) * p[:, None]
    return labels_loss(m, m.second(x + y.view(x.shape)), labels)


@case(gathered=("topk", "gather", "scatter_add"), router=lambda: nn.Linear(WIDTH, 1))
def mixture_of_depths(m, x, ids, lengths, labels):
    s = m.router(x).squeeze(-1)
    top, at = s.topk(5, dim=1)
    at, order = at.sort(1)
    top = top.gather(1, order)
    rows = at[..., None].expand(-1, -1, WIDTH)
    y = m.second(x.gather(1, rows)) * top.sigmoid()[..., None]
    return labels_loss(m, x.scatter_add(1, rows, y), labels)


@case(bn=lambda: nn.BatchNorm1d(WIDTH))
def running_statistics(m, x, ids, lengths, labels):
    return labels_loss(m, m.second(m.bn(x.transpose(1, 2)).transpose(1, 2)), labels)


@case(mean=lambda: torch.zeros(WIDTH), steps=lambda: torch.zeros((), dtype=torch.long))
def statistics_by_lerp_and_a_counter(m, x, ids, lengths, labels):
    m.steps += 1
    m.mean.lerp_(x.mean((0, 1)).detach(), 0.1)
    return labels_loss(m, m.second(x - m.mean / (1 - 0.9**m.steps)), labels)


@case(code=lambda: torch.randn(6, WIDTH))
def vector_quantizer(m, x, ids, lengths, labels):
    flat = x.reshape(-1, WIDTH)
    d = flat.square().sum(1, keepdim=True) - 2 * flat @ m.code.T + m.code.square().sum(1)
    i = d.argmin(1)
    q = m.code[i].view(x.shape)
    with torch.no_grad():
        one = F.one_hot(i, 6).to(x.dtype)
        m.code.mul_(0.99).add_(one.T @ flat / (one.sum(0)[:, None] + 1e-05), alpha=0.01)
    commit = F.mse_loss(x, q.detach())
    x = x + (q - x).detach()
    probs = one.mean(0)
    return labels_loss(m, m.second(x), labels) + commit, torch.exp(-(probs * (probs + 1e-10).log()).sum())


@case(gathered=("gather",))
def segment_sums(m, x, ids, lengths, labels):
    seg = (ids == 0).long().cumsum(1)
    s = torch.zeros_like(x).scatter_add(1, seg[..., None].expand_as(x), x)
    return labels_loss(m, m.second(x + s.gather(1, seg[..., None].expand_as(x))), labels)


@case(qkv=lambda: nn.Linear(WIDTH, 3 * WIDTH))
def packed_documents(m, x, ids, lengths, labels):
    doc = (ids == 0).long().cumsum(1)
    n = ids.size(1)
    seen = (doc[:, None, :, None] == doc[:, None, None]) & torch.ones(n, n, dtype=torch.bool).tril()
    q, k, v = heads(m.qkv(x))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    return labels_loss(m, merged(y), labels)


@case(table=lambda: nn.Embedding(ROWS + 1, WIDTH))
def positions_reset_by_document(m, x, ids, lengths, labels):
    i = torch.arange(ids.size(1)).expand_as(ids)
    start = torch.where(ids == 0, i, 0).cummax(1).values
    return labels_loss(m, m.second(x + m.table(i - start)), labels)


@case(gathered=("scatter_reduce",))
def word_pieces_to_words(m, x, ids, lengths, labels):
    h = m.second(x)
    word = (ids % 2).cumsum(1)
    into = torch.zeros(len(x), ROWS + 1, WIDTH, dtype=x.dtype)
    pooled = into.scatter_reduce(1, word[..., None].expand_as(h), h, "mean", include_self=False)
    return pooled.square().mean()


@case()
def previous_token_feature(m, x, ids, lengths, labels):
    before = torch.cat([ids.new_full((ids.size(0), 1), 1), ids[:, :-1]], 1)
    same = (before == ids).to(x.dtype)
    return labels_loss(m, m.second(x * (1 + same[..., None]) + m.words(before)), labels)


@case(gathered=("gather",))
def reversed_by_lengths(m, x, ids, lengths, labels):
    i = torch.arange(x.size(1))[None]
    back = torch.where(i < lengths[:, None], lengths[:, None] - 1 - i, i)
    y = x.gather(1, back[..., None].expand_as(x))
    return labels_loss(m, m.second(x) + m.second(y), labels)


@case()
def zeroed_in_place_past_the_end(m, x, ids, lengths, labels):
    h = m.second(x).clone()
    h[torch.arange(h.size(1))[None] >= lengths[:, None]] = 0.0
    return h.square().mean(), h


@case()
def loop_over_samples(m, x, ids, lengths, labels):
    h = m.second(x)
    total = 0
    for i in range(h.size(0)):
        total = total + h[i, : int(lengths[i])].mean(0).square().sum()
    return total


@case(token=parameter(WIDTH))
def tokens_masked_out(m, x, ids, lengths, labels):
    hidden = ids % 4 == 1
    x = torch.where(hidden[..., None], m.token, x)
    y = m.second(x)
    return (F.mse_loss(y, x.detach(), reduction="none").mean(-1) * hidden).sum() / hidden.sum()


@case(gathered=("gather",))
def masked_autoencoder(m, x, ids, lengths, labels):
    noise = (ids.to(x.dtype) * 1.7).sin() + torch.arange(ids.size(1)) * 0.001
    shuffle = noise.argsort(1)
    restore = shuffle.argsort(1)
    kept = x.gather(1, shuffle[:, :6, None].expand(-1, -1, WIDTH))
    y = m.second(kept)
    full = torch.cat([y, torch.zeros(len(x), ids.size(1) - 6, WIDTH, dtype=x.dtype)], 1)
    full = full.gather(1, restore[..., None].expand(-1, -1, WIDTH))
    return F.mse_loss(m.first(full), x.detach())
