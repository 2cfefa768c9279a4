"""Block-sparse masks become lists of blocks, of which only the rows that are needed travel."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import ringopt
from tests.harness.translation import validate

ROWS, BLOCK, HEADS, WIDTH = 60, 8, 2, 16
BLOCKS = -(-ROWS // BLOCK)


def big_bird() -> torch.Tensor:
    """[blocks, blocks]: neighbours, the first block, and one far away."""
    near = (torch.arange(BLOCKS)[:, None] - torch.arange(BLOCKS)).abs() <= 1
    near[:, 0] = near[0] = near[5, 2] = True
    return near


class Model(nn.Module):
    """Self attention over `mask(self, i, j)`: [ROWS, 1] queries, [ROWS] keys."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.qkv = mask, nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("table", big_bird())
        self.register_buffer("whole", spread(big_bird()))
        self.register_buffer("triangle", spread(big_bird()).tril())
        self.register_buffer("by_head", torch.stack([big_bird(), torch.eye(BLOCKS, dtype=torch.bool)]))
        self.double()

    def heads(self, x):
        return self.qkv(x).view(x.shape[0], -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        i = torch.arange(ROWS)
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, self.mask(self, i[:, None], i))


def spread(table):
    return table.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:ROWS, :ROWS]


SPELLINGS = {
    "a table": (lambda m, i, j: m.table[i // BLOCK, j // BLOCK], "blocks(8x8)"),
    "a table, causal": (lambda m, i, j: m.table[i // BLOCK, j // BLOCK] & (j <= i), "causal & blocks(8x8)"),
    "a table, spread": (lambda m, i, j: spread(m.table), "blocks(8x8)"),
    "all pairs": (lambda m, i, j: m.whole, "blocks(8x8)"),
    "all pairs, causal": (lambda m, i, j: m.triangle, "causal & blocks(8x8)"),
    "all pairs, filled in": (
        lambda m, i, j: torch.zeros(ROWS, ROWS, dtype=torch.float64).masked_fill(~m.whole, -torch.inf),
        "blocks(8x8)",
    ),
    "no table": (lambda m, i, j: (i // 16 == j // 16) | (j // 16 == 1), "blocks(16x16)"),
    "of each head": (lambda m, i, j: m.by_head[:, i // BLOCK, j // BLOCK], "blocks(8x8) & stored"),
    "around pairs": (
        lambda m, i, j: m.by_head[1, i // BLOCK, j // BLOCK] & ((i + j) % 2 == 0),
        "blocks(16x16) & stored & (remainder(k+q, 2) == 0)",
    ),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_mask_of_blocks_becomes_a_list_of_them(name):
    mask, pattern = SPELLINGS[name]
    verdict = validate(3, Model(mask), torch.randn(2, ROWS, WIDTH, dtype=torch.float64), inner_backend="eager")
    assert not verdict.wrong
    (site,) = verdict.report.sites
    assert (site.pattern, site.refusal) == (pattern, None)


def test_only_rows_that_some_query_needs_travel():
    """Of a block diagonal over contiguous shards whose ends cut a block, the block that is cut."""
    mask = lambda m, i, j: m.by_head[1, i // BLOCK, j // BLOCK]  # noqa: E731
    verdict = validate(4, Model(mask), torch.randn(1, ROWS, WIDTH, dtype=torch.float64), layout="contiguous")
    assert not verdict.wrong
    (site,) = verdict.report.sites
    row = 2 * WIDTH * 8  # bytes of K and V
    assert site.bytes_sent == 7 * row  # rank 0 holds rows 0:15, rank 1 sees 8:16


def test_what_is_no_list_of_blocks_stays_a_mask():
    random = torch.rand(ROWS, ROWS, generator=torch.Generator().manual_seed(0)) < 0.5
    report = ringopt.explain(Model(lambda m, i, j: random.clone()), torch.randn(1, ROWS, WIDTH).double(), world_size=2)
    assert [site.pattern for site in report.sites] == ["stored"]
