"""Placements: which tokens a rank holds, and when two tensors have the same."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.ir.placement import Layouts, Sharded, Spread, same_rows
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.symbolic_shapes import ShapeEnv


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


def test_a_sequence_of_as_many_chunks_has_their_layout_at_any_length() -> None:
    """And one of four chunks, as soon as a guard says that there are so many."""
    n = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(200, 3)).shape[0]
    padded = n + -n % 64
    layouts = Layouts("zigzag", grains=((64, padded // 64, ""), (4, n // 4, "contiguous"), (1, n // 4, "contiguous")))
    found = [layouts.of(size) for size in (n, padded, n + 3, padded // 64)]
    assert found == ["zigzag:64", "zigzag:64", "zigzag:64+3", "zigzag"]
    assert [layouts.of(n // 4 * 4), layouts.of(n // 4)] == ["contiguous:4", "contiguous"]
    assert padded // 64 == 4
    found = [layouts.of(size) for size in (n, padded, n + 3, n - 5)]
    assert found == ["zigzag:64x4", "zigzag:64x4", "zigzag:64x4", "zigzag"]  # n - 5 may be less than 3 chunks
