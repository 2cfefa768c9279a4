"""Placements: which tokens a rank holds, and when two tensors have the same."""

from __future__ import annotations

from itertools import product

import pytest

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ir.placement import Sharded, Spread, same_rows


def spread(length: int = 12, layout: str = "contiguous", dim: int = 1, width: int = 8, group: str = "world") -> Spread:
    size = (2, length, width) if dim == 1 else (length, 2, width)
    return Spread(Sharded(dim, 1, length, 1), layout, group, size, (length * width, width, 1), "x")


@pytest.mark.parametrize(("one", "other"), product(((12, "contiguous"), (12, "zigzag"), (13, "zigzag")), repeat=2))
def test_equal_tokens_on_every_rank(one: tuple[int, str], other: tuple[int, str]) -> None:
    held = [[layout_of(layout, length, 2).ranges(rank) for rank in range(2)] for length, layout in (one, other)]
    assert same_rows(spread(*one), spread(*other)) == (held[0] == held[1])


def test_other_dims_do_not_matter_and_another_mesh_does() -> None:
    assert same_rows(spread(), spread(width=16))
    assert not same_rows(spread(), spread(group="cp"))
    assert not same_rows(spread(), spread(dim=0))
