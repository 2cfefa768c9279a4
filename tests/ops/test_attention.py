"""The operator of one device, `ringopt::attention`, where what stands in the place of heads is of open size."""

from __future__ import annotations

import torch.nn.functional as F

from tests.harness.lengths import run_over
from tests.passes.test_pairs import Layers, given


def over_pairs(m, q, k, v):
    """The rows of a pair representation [B, S, S, D] attend within themselves, then its columns (AlphaFold)."""
    pair = q[:, 0, :, None] + k[:, 0, None]
    pair = pair + F.scaled_dot_product_attention(pair, pair.sin(), pair.cos())
    pair = pair + F.scaled_dot_product_attention(pair.sin().transpose(1, 2), pair.transpose(1, 2), pair).cos()
    return v + pair.mean(2)[:, None]


def test_pairs_of_tokens_at_open_lengths(caplog):
    found = run_over(Layers(over_pairs), [(given(rows),) for rows in (12, 17, 9)], 2, dynamic=True)
    (report,) = found.reports
    assert report.sharded_fraction > 0.9  # the columns are made of all tokens
    assert "error of ringopt" not in caplog.text
