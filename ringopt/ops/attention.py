"""`ringopt::attention`: every spelling of attention as one operator, on one device.

    attention(q, k, v, attn_mask?, sources, pattern, mask, dropout_p, scale)
    # q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]

`attn_mask` is what the program gave; classify_mask turns it into `pattern` (structure: full, causal, window) and `mask`
(the text of a term over b, h, q, k that reads `sources`). Query head h attends with KV head h // (Hq / Hkv).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.attention.patterns import pattern_of
from ringopt.graph.mask import Mask

LIBRARY = torch.library.Library("ringopt", "FRAGMENT")

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? attn_mask, Tensor[] sources, str pattern, str mask, "
    "float dropout_p, float scale) -> Tensor"
)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    sources: list[Tensor],
    pattern: str,
    mask: str,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """SDPA with the mask in its cheapest form; [B, Hq, Sq, Dv]."""
    causal = pattern == "causal" and q.shape[2] == k.shape[2]
    given = attn_mask
    if mask or (pattern != "full" and not causal) or (causal and given is not None):
        given, causal = whole_mask(q, k, given, sources, pattern, mask), False
    return F.scaled_dot_product_attention(
        q, k, v, given, dropout_p, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def whole_mask(q: Tensor, k: Tensor, given: Tensor | None, sources: list[Tensor], pattern: str, mask: str) -> Tensor:
    """The additive mask over all queries and keys: for one device only, where n x n is what SDPA is given anyway."""
    rows, keys = q.shape[2], k.shape[2]
    total = q.new_zeros(1, 1, rows, keys)
    if pattern != "full":
        total = total.masked_fill(~seen(pattern, rows, keys, q.device), float("-inf"))
    if mask:
        total = total + Mask.parse(mask).block(q.shape[0], q.shape[1], range(rows), range(keys), sources, q.dtype)
    if given is not None:
        total = total.masked_fill(~given, float("-inf")) if given.dtype == torch.bool else total + given
    return total


def seen(pattern: str, rows: int, keys: int, device: torch.device) -> Tensor:
    """Which key (column) a query (row) sees by structure alone."""
    band = pattern_of(pattern, rows, keys)
    offset = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    return (offset >= band.low) & (offset < band.high)


LIBRARY.impl("attention", attention_reference, "CompositeImplicitAutograd")
