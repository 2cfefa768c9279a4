"""Which rows each rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ringopt.context_parallel.geometry.layouts import layout_of, parsed
from ringopt.context_parallel.geometry.rows import count
from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open, least_and_most, same
from ringopt.sharding.ranks import Ranks, two_rows_each
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.symbolic_shapes import ShapeEnv
from tests.harness.translation import Seat


def test_a_length_that_a_guard_has_fixed() -> None:
    """It stays a SymInt to Python, which has no hash."""
    size = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(12, 3)).shape[0]
    assert is_open(size) and size == 12 and not is_open(size)
    ranks = Ranks(Seat(0, 2), lambda length: "zigzag")
    assert ranks.laid_out(size) == ranks.laid_out(12)
    assert ranks.same_rows(Sharded(1, 1, size, 1), Sharded(1, 1, 12, 1))


def at_length(length: int, look: Callable[[Any], None]) -> None:
    """Calls `look` with an open length."""
    look(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(length, 3)).shape[0])


LAYOUTS = ["contiguous", "zigzag"]


@pytest.mark.parametrize("kind", LAYOUTS)
def test_chunks_of_any_number_are_the_rows_that_are_cut_between_them(kind: str) -> None:
    def look(n: Any) -> None:
        padded = n + -n % 64
        ranks = Ranks(Seat(0, 2), lambda length: f"{kind}:64" if same(length, padded) else kind)
        rows, chunks = Sharded(1, 1, padded, 1), Sharded(1, 1, padded // 64, 64)
        assert ranks.same_rows(rows, chunks) and ranks.same_rows(chunks, rows)
        assert not ranks.same_rows(rows, Sharded(1, 1, padded // 32, 32))  # other edges
        assert not ranks.same_rows(Sharded(1, 2, padded, 1), Sharded(1, 2, n, 1))  # other sizes
        plain = Ranks(Seat(0, 2), lambda length: kind)
        assert not plain.same_rows(rows, chunks)
        for length in range(1, 700, 17):  # what was proved holds at any length
            whole = -(-length // 64) * 64
            made = Ranks(Seat(0, 2), lambda length, whole=whole: f"{kind}:64" if length == whole else kind)
            assert made.same_rows(Sharded(1, 1, whole, 1), Sharded(1, 1, whole // 64, 64))

    at_length(200, look)


@pytest.mark.parametrize("layout", [f"{kind}{units}" for kind in LAYOUTS for units in ("", ":64", ":64+3", ":64x4")])
def test_two_rows_each_are_sure_at_all_lengths_or_not_at_all(layout: str) -> None:
    def look(n: Any) -> None:
        counted = layout.endswith("x4")
        if counted:
            assert (n + -n % 64) // 64 == 4
        assert two_rows_each(n, layout, 2) == counted
        assert Ranks(Seat(0, 2), lambda length: layout).serves(n, layout, batched=True)
        assert two_rows_each(n, layout, 2)
        low, high = least_and_most(n)
        for length in range(low, min(high, 600)):
            if counted or parsed(layout).parts(length) >= 4:
                plan = layout_of(layout, length, 2)
                assert min(count(plan.ranges(rank)) for rank in range(2)) >= 2

    at_length(250, look)


def test_too_few_units_are_compiled_for_themselves() -> None:
    def look(n: Any) -> None:
        assert not Ranks(Seat(0, 2), lambda length: "zigzag:64").serves(n, "zigzag:64", batched=True)
        assert not is_open(n)

    at_length(130, look)
