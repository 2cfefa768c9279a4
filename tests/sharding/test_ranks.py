"""Which rows each rank has."""

from __future__ import annotations

import torch

from ringopt.ir.placement import Sharded
from ringopt.ir.symbolic_sizes import is_open
from ringopt.sharding.ranks import Ranks
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
