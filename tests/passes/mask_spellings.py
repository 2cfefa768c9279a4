"""Masks as programs spell them: `make(module, n, extra)`, and the pattern that each of them is."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

B, N, H, D = 2, 24, 4, 8


class Attention(nn.Module):
    """Self attention whose mask is `make(module, n, extra)`."""

    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.qkv = make, nn.Linear(H * D, 3 * H * D)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)
        self.relative = nn.Parameter(torch.randn(H, 2 * N - 1))
        self.table = nn.Parameter(torch.randn(H, 64, 64))

    def forward(self, x, extra=None):
        q, k, v = self.qkv(x).view(x.shape[0], -1, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.make(self, x.shape[1], extra))


def ends(n):
    return torch.arange(n)[:, None], torch.arange(n)[None]


X = torch.randn(B, N, H * D)
PADDING = torch.ones(B, N, dtype=torch.int64)
PADDING[1, 18:] = 0
DOCUMENTS = (torch.arange(N) // 7).expand(B, N).contiguous()
POSITIONS = torch.cat([torch.arange(10), torch.arange(6), torch.arange(8)]).expand(B, N).contiguous()
SLOPES = [2.0**-i for i in range(H)]


# ---- spellings -------------------------------------------------------------------------------------------------------
def tril_of_ones(m, n, extra):
    return torch.ones(n, n).tril().bool()


def triu_of_infinity(m, n, extra):
    return torch.full((n, n), float("-inf")).triu(1)


def triu_in_place(m, n, extra):
    mask = torch.full((n, n), float("-inf"))
    mask.triu_(1)
    return mask


def filled_in_place(m, n, extra):
    mask = torch.zeros(n, n)
    mask.masked_fill_(ends(n)[1] > ends(n)[0], float("-inf"))
    return mask


def finite_fill(m, n, extra):
    return (1.0 - torch.ones(n, n).tril()) * torch.finfo(torch.float32).min


def two_triangles(m, n, extra):
    return torch.ones(n, n).triu(-3).tril().bool()


def symmetric(m, n, extra):
    q, k = ends(n)
    return (q - k).abs() < 6


def wide_window(m, n, extra):
    q, k = ends(n)
    return (k <= q) & (k > q - 4096)


def slices_written(m, n, extra):
    mask = torch.zeros(n, n)
    mask[:, n // 2 :] = float("-inf")
    mask[:4] = 0.0
    return mask


def chunks(m, n, extra):
    q, k = ends(n)
    return (q // 8 == k // 8) & (k <= q)


def strided(m, n, extra):
    q, k = ends(n)
    return ((q - k) % 4 == 0) & (k <= q)


def sinks(m, n, extra):
    q, k = ends(n)
    return ((q - k < 6) | (k < 2)) & (k <= q)


def dilated_window(m, n, extra):
    q, k = ends(n)
    return ((q - k) % 3 == 0) & (q - k < 12) & (k <= q)


def dilated_window_added(m, n, extra):
    q, k = ends(n)
    return torch.where((k - q).abs() % 2 == 0, 0.0, -math.inf).masked_fill((q - k).abs() >= 6, -math.inf)


def same_class(m, n, extra):
    q, k = ends(n)
    return (q % 4 == k % 4) & (k <= q)


def dilated_window_and_sinks(m, n, extra):
    q, k = ends(n)
    return ((((q - k) % 2 == 0) & (q - k < 8)) | (k < 2)) & (k <= q)


def global_keys(m, n, extra):
    q, k = ends(n)
    return ((q - k).abs() < 3) | (k < 2)


def causal_window_and_global_keys(m, n, extra):
    q, k = ends(n)
    return ((k <= q) & (q - k < 3)) | (k < 2)


def further_back_than_ahead(m, n, extra):
    q, k = ends(n)
    return ((q - k) % 3 == 0) & (q - k < 12) & (k - q < 6)


def prefix(m, n, extra):
    return torch.cat([torch.ones(n, 5), torch.ones(n, n - 5).tril(-5)], 1).bool()


def strictly_below(m, n, extra):
    return torch.ones(n, n).tril(-1).bool()


def slopes(m, n, extra):
    q, k = ends(n)
    return torch.where(k <= q, torch.tensor(SLOPES)[:, None, None] * (k - q), float("-inf"))


#: no input reaches these masks: spelling -> (pattern, whether a term is left, name)
CONSTANT = {
    tril_of_ones: ("causal", False, "causal"),
    triu_of_infinity: ("causal", False, "causal"),
    triu_in_place: ("causal", False, "causal"),
    filled_in_place: ("causal", False, "causal"),
    finite_fill: ("causal", False, "causal"),
    two_triangles: ("window(4)", False, "window(4)"),
    symmetric: ("window(6,both)", False, "window(6,both)"),
    wide_window: ("causal", False, "causal"),
    slices_written: ("blocks(4x12;0:2;0:1;0:1;0:1;0:1;0:1,both)", False, "blocks(4x12)"),
    chunks: ("chunked(8)", False, "chunked(8)"),
    strided: ("causal(rate=4)", False, "causal(rate=4)"),
    same_class: ("causal(rate=4)", False, "causal(rate=4)"),
    dilated_window: ("window(4,rate=3)", False, "window(4,rate=3)"),
    dilated_window_added: ("window(3,both,rate=2)", False, "window(3,both,rate=2)"),
    dilated_window_and_sinks: ("window(4,sinks=2,rate=2)", False, "window(4,sinks=2,rate=2)"),
    global_keys: ("window(3,both,sinks=2)", False, "window(3,both,sinks=2)"),
    causal_window_and_global_keys: ("full", True, "((causal & (k-q >= -2)) | (k <= 1))"),
    further_back_than_ahead: (
        "window(4,both,rate=3)",
        True,
        "window(4,both,rate=3) & (remainder(q-k, 3) == 0) & (k-q >= -11) & (k-q <= 5)",
    ),
    sinks: ("window(6,sinks=2)", False, "window(6,sinks=2)"),
    prefix: ("full", True, "((k <= 4) | ((clamp(k-5, 0, 18) - q) <= -5))"),
    strictly_below: ("causal", True, "causal & (k-q <= -1)"),
    slopes: ("causal", True, "causal & bias"),
    lambda m, n, extra: None: ("full", False, "full"),
    lambda m, n, extra: torch.ones(n, n, dtype=torch.bool): ("full", False, "full"),
    lambda m, n, extra: torch.ones((), dtype=torch.bool).expand(n, n): ("full", False, "full"),
    lambda m, n, extra: torch.zeros(n, n): ("full", False, "full"),
}


def padded(m, n, extra):
    return extra[:, None, None, :].bool()


def padded_and_causal(m, n, extra):
    q, k = ends(n)
    return torch.zeros(()).masked_fill(k > q, -math.inf) + torch.where(extra[:, None, None] == 0, -math.inf, 0.0)


def outer_product(m, n, extra):
    return (extra[:, None, :, None] * extra[:, None, None, :]).bool()


def documents(m, n, extra):
    q, k = ends(n)
    return (extra[:, None, :, None] == extra[:, None, None, :]) & (k <= q)


def documents_from_positions(m, n, extra):
    return documents(m, n, (extra == 0).cumsum(-1))


def prefix_of_data(m, n, extra):
    q, k = ends(n)
    return (k <= q)[None, None] | (k[None, None] < extra[:, None, None, None])


def relative_bias(m, n, extra):
    q, k = ends(n)
    return m.relative[:, k - q + n - 1]


def relative_bias_and_causal(m, n, extra):
    q, k = ends(n)
    return torch.where(k <= q, m.relative[:, k - q + n - 1], torch.finfo(torch.float32).min)


def learned_pairs(m, n, extra):
    return m.table[:, :n, :n]


def stored_buffer(m, n, extra):
    return m.tril[:, :, :n, :n] == 0


def given_whole(m, n, extra):
    return extra


def learned_of_content(m, n, extra):
    return m.qkv(extra)[..., :H].transpose(1, 2)[:, :, None].expand(-1, -1, n, -1)


MASK = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(0)) > 0.3

#: spelling -> (the input, pattern, name)
READ = {
    padded: (PADDING, "full", "padding(extra)"),
    padded_and_causal: (PADDING, "causal", "causal & padding(extra)"),
    outer_product: (PADDING, "full", "mask(extra)"),
    documents: (DOCUMENTS, "causal", "causal & documents(extra)"),
    documents_from_positions: (POSITIONS, "causal", "causal & documents(extra)"),
    prefix_of_data: (torch.tensor([5, 9]), "full", "(causal | padding(extra))"),
    relative_bias: (None, "full", "bias(learned: relative)"),
    relative_bias_and_causal: (None, "causal", "causal & bias(learned: relative)"),
    learned_pairs: (None, "full", "bias(learned: table)"),
    stored_buffer: (None, "full", "stored"),
    given_whole: (MASK, "full", "stored"),
    learned_of_content: (X, "full", "bias(learned: linear_1)"),
}
