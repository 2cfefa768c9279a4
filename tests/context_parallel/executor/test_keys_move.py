"""How many queries of a forward a kernel is given at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend
from ringopt.context_parallel.executor.operands import Operands
from ringopt.context_parallel.plan import tiling
from ringopt.kernels.base import TileInputs
from ringopt.kernels.math import Math
from tests.context_parallel.executor.test_attend import attention
from tests.context_parallel.reference import problem, shard
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, run_on_threads


class Noting(Math):
    """Notes how many queries it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        self.asked.append(tile.q.shape[2])
        return super()._forward(tile)


@pytest.mark.parametrize(("dtype", "first"), [(torch.float32, [64]), (torch.bfloat16, [8] * 8)])
def test_only_a_first_tile_of_all_rows_that_becomes_the_sums_is_computed_at_once(
    dtype: torch.dtype, first: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has as many bits as they have. Beside the sums of 64 rows is else the result of an eighth of them."""
    set_limits(monkeypatch, strip=4)
    monkeypatch.setattr(tiling, "AT_ONCE", 1)
    case = problem(128, dims=(4, 4), dtype=dtype)

    def body(mesh: ThreadMesh) -> list[int]:
        kernel = Noting()
        given = (shard(x, "contiguous", 2, mesh.rank) for x in (case.q, case.k, case.v))
        attend(replace(attention(case, 2, "full", "contiguous", "ring"), kernel=kernel), mesh, Operands(*given))
        return kernel.asked

    assert run_on_threads(2, body) == [[*first, *[8] * 8]] * 2
