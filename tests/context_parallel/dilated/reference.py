"""Dilated attention from its definition: one dense softmax in which a key counts as often as patterns hold the pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Patterns:
    """(w, r) of each pattern. `rule` is "paper" or "torchscale"."""

    lengths: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool = False
    rule: str = "paper"

    def offset(self, head: int, heads: int, rate: int) -> int:
        return head % rate if self.rule == "paper" else head // math.ceil(heads / rate)

    def kept(self, n: int, heads: int, number: int) -> Tensor:
        """[heads, n]: the rows of pattern `number`."""
        w, r = self.lengths[number], self.rates[number]
        offsets = torch.tensor([self.offset(head, heads, r) for head in range(heads)])
        return torch.arange(n) % w % r == offsets[:, None]

    def times(self, n: int, heads: int) -> list[Tensor]:
        """[heads, n, n] of each pattern: whether a query sees a key."""
        t, found = torch.arange(n), []
        for number, w in enumerate(self.lengths):
            kept = self.kept(n, heads, number)
            pairs = kept[:, :, None] & kept[:, None] & (t[:, None] // w == t // w)
            found.append(pairs & (t <= t[:, None]) if self.causal else pairs)
        return found


def dilated(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: Patterns,
    seen: Tensor | None = None,
    factor: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[B, Hq, n, Dv]. A key of two patterns weighs twice: log 2 is added to its score. `seen` [B, n]. `factor` [B, Hq,
    n, n] is what dropout multiplies weights with, `sinks` [Hq] one more logit of each row."""
    n, heads = q.shape[2], q.shape[1]
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    times = torch.stack(patterns.times(n, heads)).sum(0)[None]
    if seen is not None:
        times = times * seen[:, None, None]
    hidden = (times == 0).all(-1, keepdim=True)
    scores = q @ k.mT * q.shape[3] ** -0.5 + times.to(q.dtype).log()
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1)[..., :n].masked_fill(hidden, 0.0)
    return (weights if factor is None else weights * factor) @ v


def torchscale(q: Tensor, k: Tensor, v: Tensor, patterns: Patterns) -> Tensor:
    """What microsoft/torchscale computes (`DilatedAttention`): each segment padded with zero keys to the same multiple
    of its rate, patterns mixed by weights without gradient."""
    n, heads = q.shape[2], q.shape[1]
    scores, parts, sums = q @ k.mT * q.shape[3] ** -0.5, [], []
    for number, pairs in enumerate(patterns.times(n, heads)):
        w, r = min(patterns.lengths[number], n), patterns.rates[number]
        zeros = math.ceil(w / r) - pairs.sum(-1) if not patterns.causal else torch.zeros(heads, n)
        within = torch.cat(
            [scores.masked_fill(~pairs, -math.inf), zeros.to(q.dtype).log().expand(len(q), -1, -1)[..., None]], -1
        )
        kept = patterns.kept(n, heads, number)
        parts.append(within.masked_fill(~kept[..., None], 0.0).softmax(-1)[..., :-1] @ v)
        sums.append(within.logsumexp(-1).detach().masked_fill(~kept, -math.inf))
    weights = torch.stack(sums).softmax(0).nan_to_num(0.0)
    return sum(weight[..., None] * part for weight, part in zip(weights, parts, strict=True))  # type: ignore[return-value]


def needed(patterns: Patterns, n: int, heads: int, held: Sequence[Sequence[int]]) -> list[list[int]]:
    """[user][home]: rows of keys that queries of `user` see of `home`, summed over heads and patterns."""
    found = [[0] * len(held) for _ in held]
    for pairs in patterns.times(n, heads):
        for user, queries in enumerate(held):
            seen = pairs[:, list(queries)].any(1)
            for home, keys in enumerate(held):
                if home != user:
                    found[user][home] += int(seen[:, list(keys)].sum())
    return found
