"""Masks become patterns and terms: the same mask, block by block and bit by bit, under the right name."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from ringopt.ir.nodes import shape_of
from ringopt.passes.classify_mask import ClassifyMask
from ringopt.passes.find_attention import FindAttention
from ringopt.passes.normalize import Normalize
from tests.harness.capturing import after
from tests.harness.masks import assert_same_mask, classified, only
from tests.harness.translation import validate
from tests.passes.mask_spellings import (
    CONSTANT,
    DOCUMENTS,
    PADDING,
    POSITIONS,
    READ,
    Attention,
    B,
    D,
    H,
    N,
    X,
    chunks,
    documents,
    documents_from_positions,
    ends,
    given_whole,
    learned_of_content,
    learned_pairs,
    stored_buffer,
    tril_of_ones,
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", CONSTANT, ids=lambda make: make.__name__)
def test_masks_that_no_input_reaches(make):
    site = only(Attention(make), X)
    pattern, left, name = CONSTANT[make]
    assert (site.node.args[7], bool(site.node.args[8])) == (pattern, left)
    assert site.info.pattern == name
    assert {source.op for source in site.node.args[4]} <= {"get_attr"}


@pytest.mark.sample(3)
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
    monkeypatch.setattr("ringopt.recognize.reading.split", lambda conditions, known: ("window(3)", []))
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


def test_a_mask_made_of_other_rows_pairs_is_read_whole():
    def make(m, n, extra):
        return largest(extra).flip(2)

    (site,), _context = classified(Attention(make), X, X)
    assert (site.info.refusal, site.info.pattern) == (None, "stored")
    assert validate(2, Attention(make).double(), X.double(), X.double()).wrong == ""


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
