"""`ringopt::attention`: every spelling of attention as one operator, on one device.

    attention(q, k, v, attn_mask?, sources, sinks?, seed?, pattern, mask, dropout_p, scale)
    # q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], sinks [1|B, Hq], seed int64 [] or [1 + B + Hq]

`attn_mask` is what the program gave; classify_mask turns it into `pattern` (structure: full, causal, window) and `mask`
(the text of a ringopt.expr.mask.Mask that reads `sources`). Query head h attends with KV head h // (Hq / Hkv). A sink
is one more logit in the softmax of every row of its head, and leads to no value. Weights are dropped with probability
`dropout_p`, as `seed` says (ringopt/context_parallel/executor/dropout.py); behind it may stand the numbers that the
rows of the batch and the heads have in the whole, of which these are a part. A pattern may be dilated
(ringopt/context_parallel/geometry/dilation.py); `attn_mask` then says which keys are no padding, [1|B, 1, 1, Sk] of
bool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.geometry.dilation import is_dilated
from ringopt.context_parallel.geometry.visibility import seen_whole
from ringopt.expr.mask import Mask, ScoreBlock
from ringopt.ir.symbolic_sizes import same
from ringopt.kernels.base import HIDDEN, accumulator
from ringopt.kernels.math import fold, unfold
from ringopt.ops import dilated
from ringopt.ops.ring import VERSION

LIBRARY = torch.library.Library("ringopt", "FRAGMENT")

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor[] sources, Tensor? sinks, Tensor? seed, "
    "str pattern, str mask, float dropout_p, float scale) -> Tensor"
)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sources: list[Tensor],
    sinks: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    mask: str,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """[B, Hq, Sq, Dv] by SDPA with the mask in its cheapest form, or written out where SDPA cannot say it. Raises
    ValueError for dropout without a seed, and where a dilated pattern stands beside what it cannot be joined with."""
    call = WholeAttention(q, k, v, attn_mask, sources, sinks, seed, pattern, Mask.parse(mask), dropout_p, scale)
    if is_dilated(pattern):
        if mask:
            raise ValueError("ringopt::attention: dilated attention has no mask but of keys")
        config = dilated.Config(
            k.shape[2], pattern, dropout_p, scale, "contiguous", "auto", "auto", group="pretend:0/1", version=VERSION
        )
        return dilated.dilated_attention(q, k, v, attn_mask, sinks, seed, *config.plain)[0]  # type: ignore[no-any-return]
    if dropout_p > 0 and seed is None:
        raise ValueError(f"ringopt::attention: dropout_p is {dropout_p}, and there is no seed to draw from")
    plain, grouped = attn_mask is None and not any(call.mask.terms), not same(q.shape[1], k.shape[1])
    causal = pattern == "causal" and same(q.shape[2], k.shape[2])
    if plain and sinks is None and not dropout_p and (pattern == "full" or causal):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # A row of finite fills: SDPA's fast kernels round its log-sum-exp, and their backward takes it for the truth.
    # softmax does not, so a program that spelled it out (`nan`) keeps its own. Nor has it 16 bits if its bias has more.
    given = call.mask.bias
    bias = given is not None and (call.mask.nan or given.dtype.itemsize > q.dtype.itemsize)
    if bias or sinks is not None or dropout_p or call.mask.score is not None:
        return written_out(call)
    whole = call.whole_mask(q.dtype)
    out = F.scaled_dot_product_attention(q, k, v, whole, scale=scale, enable_gqa=grouped)
    if whole is None or not call.mask.nan:
        return out
    hidden = hidden_rows(whole)
    if call.mask.stops:  # NaN weights, in whose gradient the values have a part: the scores were filled
        weight = torch.where(hidden, torch.nan, 0.0).to(out.dtype)
        return out.masked_fill(hidden, 0.0) + weight * v.mean(2, True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    # A factor, so that the gradients of such a row are NaN too, and those of all keys and values, as behind softmax.
    return out * torch.where(hidden, torch.nan, 1.0).to(out.dtype)


@dataclass(frozen=True)
class WholeAttention:
    """The arguments of `ringopt::attention`, its mask parsed. For one device only, where SDPA is given a mask of n x n
    anyway."""

    q: Tensor
    k: Tensor
    v: Tensor
    attn_mask: Tensor | None
    sources: list[Tensor]
    sinks: Tensor | None
    seed: Tensor | None
    pattern: str
    mask: Mask
    dropout_p: float
    scale: float

    @property
    def groups(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def block(self) -> ScoreBlock:
        batch, heads = self.q.shape[:2]
        queries, keys = (torch.arange(x.shape[2], device=x.device) for x in (self.q, self.k))  # the sizes may be open
        return ScoreBlock(batch, heads, queries, keys)

    def whole_mask(self, dtype: torch.dtype) -> Tensor | None:
        """What is added over all queries and keys, None where nothing is hidden or added."""
        q, given, pattern, mask = self.q, self.attn_mask, self.pattern, self.mask
        if pattern == "full" and given is None and mask.visible is None and mask.bias is None:
            return None
        rows, keys = q.shape[2], self.k.shape[2]  # of any length where the pattern is
        total = q.new_zeros(1, 1, rows, keys, dtype=dtype)
        if pattern != "full":
            total = total.masked_fill(~seen_whole(pattern, rows, keys, q.device), HIDDEN)
        if mask.visible is not None or mask.bias is not None:
            total = total + mask.additive(self.block, self.sources, dtype, q.device)
        if given is not None:
            total = total.masked_fill(~given, HIDDEN) if given.dtype == torch.bool else total + given
        return total


def written_out(call: WholeAttention) -> Tensor:
    """Matmul, softmax in accumulator(q.dtype), matmul."""
    q, k, v, mask, sinks, groups, block = call.q, call.k, call.v, call.mask, call.sinks, call.groups, call.block
    wide, (batch, heads, rows, _) = accumulator(q.dtype), q.shape
    scores = unfold(fold(q, groups) @ k.mT, groups).to(wide) * call.scale
    scores = mask.modified(scores, block, call.sources)
    whole = call.whole_mask(wide)
    if mask.score is not None and whole is not None:  # infinite where it is hidden, it would be no number
        scores = scores.masked_fill((whole == HIDDEN) & ~scores.isfinite(), 0.0)
    if whole is not None:
        scores = (scores.masked_fill(whole == HIDDEN, 0.0) if mask.stops else scores) + whole
    if sinks is not None:
        logits = sinks[..., None, None].to(wide).expand(batch, heads, rows, 1)
        weights = torch.cat([scores, logits], -1).softmax(-1)[..., :-1]
    elif mask.nan or whole is None:
        weights = scores.softmax(-1)
    else:
        hidden = hidden_rows(whole)
        weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)
    if call.dropout_p and call.seed is not None:
        seed = call.seed.to(q.device)
        in_batch, among_heads = seed[1:].split([batch, heads]) if seed.dim() else (batch, heads)
        drop = Dropout(call.dropout_p, seed.view(-1)[0])
        weights = weights * drop.factor(in_batch, among_heads, block.queries, block.keys, wide)
    return unfold(fold(weights.to(v.dtype), groups) @ v, groups)


def hidden_rows(mask: Tensor) -> Tensor:
    """[1|B, 1|Hq, Sq, 1]: which rows of an additive mask hide all keys."""
    return (mask == HIDDEN).all(-1, keepdim=True)


LIBRARY.impl("attention", attention_reference, "CompositeImplicitAutograd")
