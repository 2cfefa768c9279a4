"""What dilated attention holds, by hand."""

from __future__ import annotations

import pytest

from ringopt.cost.dilated import DilatedCase, dilated_bytes, dilated_memory, per_row
from ringopt.cost.simulate import Heads


def test_a_kept_row_of_a_term() -> None:
    """4 query heads and 2 of keys have 3 numbers a key and 5 a value, of 2 bytes: q, k, v and the output, beside the
    output and its log-sum-exp as sums, of 4 bytes. Backward there is the gradient of the output too, and the sums are
    those of q, k and v."""
    heads = Heads(1, 4, 2, 3, 5, 2, 4, "bfloat16", "flash_cpu")
    first = DilatedCase("dilated(8:1,29:2,causal)", 29, heads, True, "auto").plan(2, "contiguous").terms[0]
    assert per_row(first, heads, backward=False) == (4 + 2) * (3 + 5) * 2 + 4 * (5 + 1) * 4
    assert per_row(first, heads, backward=True) == ((4 + 2) * (3 + 5) + 4 * 5) * 2 + (4 * 3 + 2 * (3 + 5)) * 4


@pytest.mark.parametrize(("rank", "exchanged"), [(0, 6 * 192 + (7 + 7) * 112), (1, 4 * 192 + (15 + 14) * 112)])
def test_a_forward_holds_sums_packed_rows_and_one_tile(rank: int, exchanged: int) -> None:
    """Sums of 14 rows or 15 in 32 bits, and the output in 16; of terms that are exchanged, own rows and those that
    come; of segments within the shard the largest, of 8 rows. A kept row takes 192 bytes of the first term, and 112 of
    each half of the second's heads."""
    heads = Heads(1, 4, 2, 3, 5, 2, 4, "bfloat16", "flash_cpu")
    plan = DilatedCase("dilated(8:1,29:2,causal)", 29, heads, True, "auto").plan(2, "contiguous")
    sums = (14, 15)[rank] * 4 * ((5 + 1) * 4 + 5 * 2)
    assert dilated_memory(plan, heads, rank, backward=False) == sums + exchanged + 8 * 192


@pytest.mark.parametrize(("mixing", "forwards"), [("", 1), (",torchscale mixing", 2)])
def test_a_backward_sends_rows_of_keys_again_and_their_gradients_home(mixing: str, forwards: int) -> None:
    """Rank 0 sends 6 rows of the segment that is cut and 7 of each half of the second term's heads, each of two KV
    heads; rank 1 sends as many gradients back, in 32 bits. Of torchscale's mixing a backward runs the forward first."""
    heads = Heads(1, 4, 2, 3, 5, 2, 4, "bfloat16", "flash_cpu")
    plan = DilatedCase(f"dilated(8:1,29:2,causal{mixing})", 29, heads, True, "auto").plan(2, "contiguous")
    numbers = 2 * (6 + 7 + 7) * (3 + 5)
    assert [dilated_bytes(plan, heads, rank, backward=False) for rank in (0, 1)] == [numbers * 2, 0]
    assert [dilated_bytes(plan, heads, rank, backward=True) for rank in (0, 1)] == [forwards * numbers * 2, numbers * 4]
