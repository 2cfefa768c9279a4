"""Masks that are known at compile time, as a list of blocks."""

from __future__ import annotations

import torch

from ringopt.expr.block_sparse import block_list
from ringopt.expr.simplify import apply, compare
from ringopt.expr.terms import axis

BLOCK = 16
SAME = compare("eq", *(apply("floor_divide", [axis(name), BLOCK], torch.int64) for name in "qk"))


def listed(queries: int, keys: int):
    """Of queries that see the keys of their own block of 16."""
    return block_list([SAME], False, {}, {"b": 1, "h": 1, "q": queries, "k": keys})


def test_a_mask_that_is_known_is_a_list_of_blocks() -> None:
    assert listed(48, 64) == ("blocks(16x16;0:1;1:2;2:3,both)", [SAME])


def test_more_pairs_than_are_computed_are_no_list() -> None:
    """One pair a block of 16: 4096 blocks of queries, and one of keys more than makes 16 million pairs."""
    assert listed(BLOCK << 12, BLOCK * ((1 << 12) + 1)) is None
