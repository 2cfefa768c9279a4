"""Process groups: their stores, and calls that changed between releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "default_store", "keeps_order_of_ranks", "new_group", "store_of"]


def default_store() -> dist.Store:
    """The store that all ranks of the default group reach."""
    return dist.distributed_c10d._get_default_store()


def store_of(group: Any) -> dist.Store:
    """A store that the ranks of the group reach, whose keys are its own."""
    return dist.distributed_c10d._get_process_group_store(group)


def keeps_order_of_ranks() -> bool:
    """Whether a group can have its ranks in another than ascending order: from torch 2.12 on."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def new_group(ranks: Sequence[int], timeout: timedelta, members_only: bool) -> Any:
    """A group of the ranks, in their order where torch keeps it; made by its members alone, or by all of the world."""
    order: dict[str, Any] = {"sort_ranks": False} if keeps_order_of_ranks() else {}
    return dist.new_group(list(ranks), timeout, use_local_synchronization=members_only, **order)


# (whole, mine, group=, async_op=): one message to all; its name from torch 2.13 on.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
