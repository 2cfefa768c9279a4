"""What is made of the last activations: pooling, losses, several outputs."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.ordinary.model import HEADS, WIDTH, WORDS, case, parameter


@case()
def last_valid_token_by_lengths(m, x, ids, lengths, labels):
    h = m.second(x)
    last = h[torch.arange(h.size(0)), lengths - 1]
    return F.cross_entropy(m.head(last), labels[:, 0]), last


@case()
def last_valid_token_by_gather(m, x, ids, lengths, labels):
    h = m.second(x)
    index = (lengths - 1).view(-1, 1, 1).expand(-1, 1, h.size(-1))
    last = h.gather(1, index).squeeze(1)
    return F.cross_entropy(m.head(last), labels[:, 0])


@case()
def sequence_classification_of_hf(m, x, ids, lengths, labels):
    logits = m.head(m.second(x))
    non_pad = (ids != 0).int()
    token = (torch.arange(ids.shape[-1]) * non_pad).argmax(-1)
    pooled = logits[torch.arange(ids.shape[0]), token]
    return F.cross_entropy(pooled, labels[:, 0]), pooled


@case()
def masked_mean_by_lengths(m, x, ids, lengths, labels):
    h = m.second(x)
    mask = torch.arange(h.size(1))[None] < lengths[:, None]
    pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True).clamp(min=1e-09)
    return F.cross_entropy(m.head(pooled), labels[:, 0])


@case()
def masked_max_pooling(m, x, ids, lengths, labels):
    h = m.second(x)
    mask = torch.arange(h.size(1))[None] >= lengths[:, None]
    pooled = h.masked_fill(mask.unsqueeze(-1), float("-inf")).max(dim=1).values
    return F.cross_entropy(m.head(pooled), labels[:, 0])


@case(score=lambda: nn.Linear(WIDTH, 1))
def attentive_statistics_pooling(m, x, ids, lengths, labels):
    h = m.second(x)
    w = m.score(torch.tanh(h)).softmax(1)
    mean = (w * h).sum(1)
    std = ((w * h.square()).sum(1) - mean.square()).clamp(min=1e-05).sqrt()
    return torch.cat([mean, std], 1).square().mean()


@case(query=parameter(1, 1, WIDTH), pool=lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
def cross_attention_pooling(m, x, ids, lengths, labels):
    h = m.second(x)
    pooled, _ = m.pool(
        m.query.expand(h.size(0), -1, -1),
        h,
        h,
        key_padding_mask=torch.arange(h.size(1))[None] >= lengths[:, None],
        need_weights=False,
    )
    return F.cross_entropy(m.head(pooled[:, 0]), labels[:, 0])


@case()
def top_k_pooling(m, x, ids, lengths, labels):
    h = m.second(x)
    return h.topk(3, dim=1).values.mean(1).square().sum()


@case(rows=16, gathered=("adaptive_max_pool1d",))
def spatial_pyramid(m, x, ids, lengths, labels):
    h = m.second(x).transpose(1, 2)
    return torch.cat([F.adaptive_max_pool1d(h, k).flatten(1) for k in (1, 2, 4)], 1).square().sum()


@case()
def ctc_loss(m, x, ids, lengths, labels):
    logp = m.head(m.second(x)).log_softmax(-1).transpose(0, 1)
    target = ids[:, :4].clamp(min=1)
    return F.ctc_loss(logp, target, torch.full((ids.size(0),), ids.size(1)), torch.full((ids.size(0),), 4))


@case()
def masked_words_by_boolean_index(m, x, ids, lengths, labels):
    h = m.second(x)
    masked = labels != -100
    return F.cross_entropy(m.head(h[masked]), labels[masked])


@case()
def masked_words_by_places(m, x, ids, lengths, labels):
    h = m.second(x)
    places = torch.stack([lengths - 1, lengths - 2, lengths // 2], 1)
    picked = torch.gather(h, 1, places[..., None].expand(-1, -1, WIDTH))
    return F.cross_entropy(m.head(picked).flatten(0, 1), ids.gather(1, places).flatten())


@case()
def accuracy_beside_the_loss(m, x, ids, lengths, labels):
    logits = m.head(m.second(x))
    loss = F.cross_entropy(logits.view(-1, WORDS), labels.view(-1))
    valid = labels != -100
    right = ((logits.argmax(-1) == labels) & valid).sum() / valid.sum()
    return {"loss": loss, "accuracy": right, "perplexity": loss.detach().exp()}


@case()
def contrastive_over_the_batch(m, x, ids, lengths, labels):
    h = F.normalize(m.second(x).mean(1), dim=-1)
    g = F.normalize(m.second(x.flip(1)).mean(1), dim=-1)
    s = h @ g.T / 0.07
    t = torch.arange(len(h))
    return (F.cross_entropy(s, t) + F.cross_entropy(s.T, t)) / 2


@case(gathered=("matmul",))
def contrastive_over_the_sequence(m, x, ids, lengths, labels):
    h = F.normalize(m.second(x), dim=-1)
    s = h[:, :-1] @ h[:, 1:].transpose(1, 2)
    t = torch.arange(s.size(1)).expand(s.size(0), -1)
    return F.cross_entropy(s.flatten(0, 1), t.flatten())


@case(gathered=("cross_entropy_loss",), spans=lambda: nn.Linear(WIDTH, 2))
def span_extraction(m, x, ids, lengths, labels):
    start, end = m.spans(m.second(x)).split(1, dim=-1)
    start, end = start.squeeze(-1).contiguous(), end.squeeze(-1).contiguous()
    a, b = ((lengths // 2).clamp(0, start.size(1)), lengths - 1)
    return (F.cross_entropy(start, a, ignore_index=start.size(1)) + F.cross_entropy(end, b)) / 2, start, end


@case(value=lambda: nn.Linear(WIDTH, 1))
def reward_model(m, x, ids, lengths, labels):
    r = m.value(m.second(x)).squeeze(-1)
    r = r[torch.arange(r.size(0)), lengths - 1]
    return -F.logsigmoid(r[:1] - r[1:]).mean(), r


@case()
def preference_loss(m, x, ids, lengths, labels):
    logp = m.head(m.second(x))[:, :-1].log_softmax(-1)
    target = labels[:, 1:].clone()
    mask = target != -100
    target[target == -100] = 0
    per = torch.gather(logp, 2, target.unsqueeze(2)).squeeze(2)
    s = (per * mask).sum(-1)
    return -F.logsigmoid(0.1 * (s[0] - s[1]))


@case(value=lambda: nn.Linear(WIDTH, 1))
def policy_gradient(m, x, ids, lengths, labels):
    h = m.second(x)
    logp = torch.distributions.Categorical(logits=m.head(h)).log_prob(ids)
    v = m.value(h).squeeze(-1)
    reward = (ids % 3).to(x.dtype)
    returns = reward.flip(1).cumsum(1).flip(1)
    adv = (returns - v).detach()
    adv = (adv - adv.mean()) / (adv.std() + 1e-08)
    ratio = torch.exp(logp - logp.detach())
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() + F.mse_loss(v, returns)


@case()
def label_smoothing_by_hand(m, x, ids, lengths, labels):
    logp = m.head(m.second(x)).log_softmax(-1)
    ignore = labels.eq(-100)
    nll = -logp.gather(-1, labels.clamp(0).unsqueeze(-1)).squeeze(-1)
    smooth = -logp.mean(-1)
    nll, smooth = nll.masked_fill(ignore, 0.0), smooth.masked_fill(ignore, 0.0)
    return (0.9 * nll + 0.1 * smooth).sum() / (~ignore).sum()


@case()
def distillation(m, x, ids, lengths, labels):
    with torch.no_grad():
        teacher = m.head(m.first(x) * 2)
    student = m.head(m.second(x))
    kl = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="none").sum(-1)
    mask = (labels != -100).to(x.dtype)
    return (kl * mask).sum() / mask.sum() * 4


@case()
def weighted_by_token_and_sample(m, x, ids, lengths, labels):
    ce = F.cross_entropy(m.head(m.second(x)).flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    w = torch.linspace(1, 2, labels.size(1), dtype=x.dtype)
    return ((ce * w).sum(1) / lengths).mean()


@case()
def chunked_loss(m, x, ids, lengths, labels):
    h = m.second(x)
    total = 0.0
    for hc, lc in zip(h.chunk(3, 1), labels.chunk(3, 1), strict=True):
        total = total + F.cross_entropy(m.head(hc).flatten(0, 1), lc.flatten(), reduction="sum")
    return total / (labels != -100).sum()


@case(heads=lambda: nn.ModuleList(nn.Linear(WIDTH, WORDS) for _ in range(3)))
def several_tokens_ahead(m, x, ids, lengths, labels):
    h = m.second(x)
    return sum(
        (
            F.cross_entropy(head(h[:, : -(k + 1)]).flatten(0, 1), ids[:, k + 1 :].flatten())
            for k, head in enumerate(m.heads)
        )
    )


@case(trans=parameter(WORDS, WORDS))
def crf(m, x, ids, lengths, labels):
    e = m.head(m.second(x))
    gold = labels.clamp(0)
    score = e.gather(2, gold.unsqueeze(2)).squeeze(2).sum(1) + m.trans[gold[:, :-1], gold[:, 1:]].sum(1)
    alpha = e[:, 0]
    for t in range(1, e.size(1)):
        alpha = torch.logsumexp(alpha.unsqueeze(2) + m.trans, dim=1) + e[:, t]
    return (alpha.logsumexp(-1) - score).mean()


@case(rows=12)
def tensor_split_and_stack(m, x, ids, lengths, labels):
    a, b, c = torch.tensor_split(m.second(x), 3, dim=1)
    return torch.stack([a, b, c]).mean(0).square().sum(), torch.hstack([a, c])


@case(gathered=("linalg_norm",))
def spectral_energy_returned(m, x, ids, lengths, labels):
    h = m.second(x)
    return h.norm(), h.std(1), h.min(), h.abs().amax(dim=(1, 2)), torch.linalg.norm(h, dim=(1, 2))
