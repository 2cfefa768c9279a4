"""Data loading beside a sharded sequence: every rank that shares one passes the same batch.

loader = DataLoader(dataset, batch_size=1, sampler=ringopt.SameBatchSampler(dataset, dp=mesh["dp"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, DistributedSampler

from ringopt.options import check_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class SameBatchSampler(DistributedSampler[Any]):
    """Indices for a DataLoader: the same on all ranks that share a sequence, others on each rank along `dp`.

    dataset     with a length
    dp          the data-parallel slice of the mesh, such as mesh["dp"]; None: all ranks share each sequence
    shuffle     in an order that follows from `seed` and the epoch; call `set_epoch` before each, as with torch's
                DistributedSampler, which this is
    drop_last   leave out the last indices where ranks along `dp` could not have equally many; else some come twice

    Raises OptionError where `dp` is no 1-D mesh of which this rank is one.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        dp: DeviceMesh | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ):
        replicas, rank = 1, 0
        if dp is not None:
            check_mesh(dp, "dp")
            replicas, rank = dp.size(), dp.get_local_rank()
        super().__init__(dataset, replicas, rank, shuffle, seed, drop_last)
