"""What dilated attention sees, row by row."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from ringopt.context_parallel.geometry.dilation import dilation_of
from ringopt.context_parallel.geometry.pattern import Kind

LENGTH, HEADS = 20, 2


def seen(text: str, query: int, key: int, head: int) -> bool:
    """By the definition of the rows that a pattern keeps."""
    dilation = dilation_of(text)
    for w, r in zip(dilation.segment_lengths, dilation.dilation_rates, strict=True):
        kept = all(row % w % r == head % r for row in (query, key))
        if kept and query // w == key // w and (key <= query or not dilation.causal):
            return True
    return False


@pytest.mark.parametrize("text", ["dilated(6:1)", "dilated(6:1,causal)", "dilated(6:1,20:2)", "dilated(20:4,causal)"])
def test_a_block_within_a_segment_of_rate_1_is_seen_whole_and_others_in_part_where_some_head_sees_a_pair(
    text: str,
) -> None:
    blocks = [range(*ends) for ends in pairwise((0, 3, 6, 8, 10, 12, 17, 18, LENGTH))]
    for queries, keys in product(blocks, repeat=2):
        pairs = [seen(text, q, k, head) for q, k, head in product(queries, keys, range(HEADS))]
        kind = Kind.FULL if all(pairs) else Kind.PARTIAL if any(pairs) else Kind.EMPTY
        assert dilation_of(text).kind(queries, keys, LENGTH, HEADS) is kind, (queries, keys)
