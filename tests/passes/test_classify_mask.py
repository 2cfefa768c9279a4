"""Masks become patterns and terms: the same mask, block by block and bit by bit, under the right name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.graph.nodes import shape_of
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from tests.capturing import after
from tests.masks import assert_same_mask, classified, only
from tests.translation import validate

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


@pytest.mark.parametrize("make", CONSTANT, ids=lambda make: make.__name__)
def test_masks_that_no_input_reaches(make):
    site = only(Attention(make), X)
    pattern, left, name = CONSTANT[make]
    assert (site.node.args[7], bool(site.node.args[8])) == (pattern, left)
    assert site.info.pattern == name
    assert {source.op for source in site.node.args[4]} <= {"get_attr"}


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


@pytest.mark.parametrize("make", READ, ids=lambda make: make.__name__)
def test_masks_that_read_tensors(make):
    extra, pattern, name = READ[make]
    site = only(Attention(make), X, *([] if extra is None else [extra]))
    assert site.node.args[7] == pattern
    assert site.info.pattern == name
    assert all(source.dim() < 3 for source in site.sources) or make in (
        learned_pairs, stored_buffer, given_whole, learned_of_content
    )  # fmt: skip


# ---- a finite fill is not -inf ---------------------------------------------------------------------------------------
def test_finite_fill_of_padding_stays_a_bias():
    """A row that sees no key attends to all alike: nothing proves that the rows of `extra` hold a 1."""
    site = only(Attention(lambda m, n, extra: (1.0 - extra[:, None, None].float()) * -1e9), X, PADDING)
    assert site.node.args[7] == "full" and site.mask.visible is None and site.mask.bias is not None


def test_finite_fill_of_causal_and_padding_stays_whole():
    def make(m, n, extra):
        q, k = ends(n)
        return torch.where((k <= q) & extra[:, None, None].bool(), 0.0, torch.finfo(torch.float32).min)

    left = PADDING.flip(1)
    site = only(Attention(make), X, left)
    assert site.node.args[7] == "full" and site.mask.visible is None


def test_finite_fill_of_causal_and_documents_hides():
    """Every row sees itself: the diagonal is causal, and of one document with itself."""

    def make(m, n, extra):
        return (1.0 - documents(m, n, extra).float()) * -1e9

    site = only(Attention(make), X, DOCUMENTS)
    assert site.node.args[7] == "causal" and site.mask.bias is None


@pytest.mark.parametrize("fill", [-1e4, -100.0])
def test_fill_that_a_score_could_reach_stays_a_bias(fill):
    site = only(Attention(lambda m, n, extra: (1.0 - torch.ones(n, n).tril()) * fill), X)
    assert site.node.args[7] == "full" and site.mask.visible is None


def test_finite_fill_beside_a_bias_of_unknown_size_stays():
    """An input may itself hold -inf on the only key that a row sees."""

    def make(m, n, extra):
        q, k = ends(n)
        return torch.where(k <= q, 0.0, -1e9) + extra

    site = only(Attention(make), X, torch.randn(N, N))
    assert site.node.args[7] == "full" and site.mask.visible is None


def test_soft_mask_is_a_bias():
    site = only(Attention(lambda m, n, extra: (1.0 - extra[:, None, None]) * -math.inf), X, PADDING * 0.5)
    assert site.mask.visible is None and site.info.pattern == "bias(extra)"


# ---- shapes ----------------------------------------------------------------------------------------------------------
class Cross(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, q, k):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(self.offset)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.parametrize(("offset", "pattern", "left"), [(0, "causal", False), (4, "full", True), (-1, "causal", True)])
def test_only_upper_left_is_causal_over_different_lengths(offset, pattern, left):
    site = only(Cross(offset), torch.randn(B, H, 12, D), torch.randn(B, H, 16, D))
    assert (site.node.args[7], bool(site.node.args[8])) == (pattern, left)


def test_long_masks_are_compared_in_blocks(monkeypatch):
    monkeypatch.setattr("ringopt.passes.classify_mask.WHOLE", 1000)
    site = only(Attention(chunks), X.repeat(1, 4, 1))
    assert site.node.args[7] == "chunked(8)"


def test_a_difference_from_the_programs_mask_is_refused(monkeypatch):
    monkeypatch.setattr("ringopt.graph.reading.split", lambda conditions, known: ("window(3)", []))
    (site,), _context = classified(Attention(tril_of_ones), X)
    assert site.node.args[3] is not None and site.node.args[7] == "full"
    assert site.info.refusal == (
        "the mask read as window(3) differs from the program's own in queries 0 to 23, keys 0 to 23: "
        "a fault of ringopt, please report it"
    )


def largest(extra):
    scores = extra @ extra.transpose(1, 2)
    return (scores >= scores.topk(4, -1).values[..., -1:])[:, None]


@pytest.mark.parametrize("turned", (False, True))
def test_a_mask_made_of_pairs_is_computed_a_row_at_a_time(turned):
    def make(m, n, extra):
        return largest(extra).mT if turned else largest(extra)

    (site,), _context = classified(Attention(make), X, X)
    assert site.info.refusal is None and site.info.pattern == "mask(x)"
    assert site.info.notes == [
        "matmul [2, 24, 24] is not read element by element: every rank computes the rows of its own queries"
    ]
    assert validate(2, Attention(make).double(), X.double(), X.double()).wrong == ""


def test_a_mask_made_of_other_rows_pairs_is_refused():
    def make(m, n, extra):
        return largest(extra).flip(2)

    (site,), _context = classified(Attention(make), X, X)
    assert site.info.refusal == (
        "matmul makes a tensor [2, 24, 24] over queries and keys from data, and it is not read a row at a time"
    )
    assert site.info.pattern == "mask"
    assert site.node.args[3] is not None and site.node.args[4:9] == ([], None, None, "full", "")


def test_sites_that_share_a_mask_are_read_alike():
    class Two(nn.Module):
        def forward(self, x, padding):
            mask = padding[:, None, None, :].bool()
            y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return F.scaled_dot_product_attention(y, y, y, attn_mask=mask)

    sites, _context = classified(Two(), torch.randn(B, H, N, D), PADDING)
    assert sites[0].node.args[4:7] == sites[1].node.args[4:7]
    for site in sites:
        assert_same_mask(site)


def test_no_mask_is_computed_any_more():
    gm, _context = after(
        (Normalize(), FindAttention(), ClassifyMask()), Attention(documents_from_positions), X, POSITIONS
    )
    assert all(shape_of(node)[-2:] != (N, N) for node in gm.graph.nodes if node.op == "call_function")
