"""What a tile holds beside its sums, by hand: 4 queries, 6 keys, 2 heads with 3 numbers a key and 5 a value."""

from __future__ import annotations

import pytest

from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.plan.exchange import Block
from ringopt.cost.simulate import Heads
from ringopt.cost.tile_memory import Sums, TileBytes, first_tile, scratch

WIDE = Heads(1, 2, 2, 3, 5, 4, 4, "float32", "math")
HALF = Heads(1, 2, 2, 3, 5, 2, 4, "bfloat16", "math")
SCORES = 4 * 6 * 2 * 4  # bytes, in 32 bits


def test_the_first_tile_is_where_the_sums_will_be() -> None:
    """24 elements of a mask take 11 bytes each while it is made, then 4. Beside them are 160 bytes of the output, 32 of
    its log-sum-exp, and scores with their exponentials; of all this the mask and a copy of the log-sum-exp are left."""
    block = Block(range(4), range(6), Kind.PARTIAL)
    found = first_tile(pattern_of("window(3)", 6, 6), block, WIDE)
    assert found == TileBytes(making=24 * 11, working=96 + 160 + 32 + 2 * SCORES, adding=96 + 32, kept=96)


@pytest.mark.parametrize(("heads", "copies"), [(WIDE, 0), (HALF, 6 * 2 * (3 + 5) * 4)])
def test_products_written_out_copy_keys_of_few_bits(heads: Heads, copies: int) -> None:
    """To 32 bits; what has them already is not copied. Backward there are the gradients of the scores too."""
    part = Sums(heads, 4, 6)
    assert [scratch(part), scratch(part, backward=True)] == [copies + 2 * SCORES, copies + 4 * SCORES]
