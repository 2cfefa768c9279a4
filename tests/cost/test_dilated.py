"""What dilated attention holds, by hand."""

from __future__ import annotations

from ringopt.cost.dilated import DilatedCase, per_row
from ringopt.cost.simulate import Heads


def test_a_kept_row_of_a_term() -> None:
    """4 query heads and 2 of keys have 3 numbers a key and 5 a value, of 2 bytes: q, k, v and the output, beside the
    output and its log-sum-exp as sums, of 4 bytes. Backward there is the gradient of the output too, and the sums are
    those of q, k and v."""
    heads = Heads(1, 4, 2, 3, 5, 2, 4, "bfloat16", "flash_cpu")
    first = DilatedCase("dilated(8:1,29:2,causal)", 29, heads, True, "auto").plan(2, "contiguous").terms[0]
    assert per_row(first, heads, backward=False) == (4 + 2) * (3 + 5) * 2 + 4 * (5 + 1) * 4
    assert per_row(first, heads, backward=True) == ((4 + 2) * (3 + 5) + 4 * 5) * 2 + (4 * 3 + 2 * (3 + 5)) * 4
