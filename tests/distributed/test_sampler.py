"""Ranks that share a sequence draw the same indices; ranks along the data-parallel dim share them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import ringopt
from ringopt.errors import OptionError


class Mesh:
    """As much of a DeviceMesh as a sampler asks for: this rank's place among `ranks`."""

    ndim, mesh_dim_names = 1, ("dp",)

    def __init__(self, ranks: int, rank: int):
        self.ranks, self.rank, self.mesh = ranks, rank, torch.arange(ranks)

    def get_group(self) -> None: ...

    def get_coordinate(self) -> list[int]:
        return [self.rank]

    def size(self) -> int:
        return self.ranks

    def get_local_rank(self) -> int:
        return self.rank


def drawn(epoch: int, dp: Any = None, **how: Any) -> list[int]:
    data: Any = list(range(10))
    sampler = ringopt.SameBatchSampler(data, dp=dp, **how)
    sampler.set_epoch(epoch)
    return [int(batch[0]) for batch in DataLoader(data, sampler=sampler)]


def test_without_a_mesh_every_rank_draws_all_indices_in_one_order() -> None:
    """The order follows from seed and epoch alone, so from no process group and from no generator of the rank."""
    torch.manual_seed(1)
    first = drawn(0)
    torch.manual_seed(2)
    assert first == drawn(0) and sorted(first) == list(range(10))
    assert first != drawn(1) and first != drawn(0, seed=5)
    assert drawn(0, shuffle=False) == list(range(10))


@pytest.mark.parametrize(("drop_last", "share"), [(False, 4), (True, 3)])
def test_ranks_along_dp_share_the_indices_out(drop_last: bool, share: int) -> None:
    parts = [drawn(0, Mesh(3, rank), drop_last=drop_last) for rank in range(3)]
    assert [len(part) for part in parts] == [share] * 3
    seen = [index for part in parts for index in part]
    assert len(set(seen)) == (9 if drop_last else 10)


@pytest.mark.parametrize("dp", ["dp", 2])
def test_what_is_no_mesh_is_refused(dp: Any) -> None:
    with pytest.raises(OptionError, match=r"dp=.*expected a torch.distributed DeviceMesh"):
        drawn(0, dp)
