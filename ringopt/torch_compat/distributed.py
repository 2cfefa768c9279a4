"""Process groups: their stores, and calls that changed between releases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from ringopt.torch_compat.autograd import never_compiled

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_single",
    "bound_device",
    "carries_nothing",
    "default_store",
    "device_types",
    "keeps_order_of_ranks",
    "new_group",
    "sends_in_batches",
    "store_of",
    "waited",
]

# AsyncCollectiveTensor: what a collective that a DTensor has started will give.


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
    with _unbound_world(members_only) as bound:
        return dist.new_group(list(ranks), timeout, use_local_synchronization=members_only, **order, **bound)


@contextmanager
def _unbound_world(members_only: bool) -> Iterator[dict[str, Any]]:
    """Where the world is bound to a device (`init_process_group(device_id=...)`), torch splits its communicator for a
    new group, which every rank of the world has to take part in: a group that its members make alone would wait for
    ever. Without the binding it gets a communicator of its own; yields what binds it in its turn."""
    world: Any = dist.group.WORLD
    device = bound_device(world)
    if device is None or not members_only:
        yield {}
        return
    world.bound_device_id = None
    try:
        yield {"device_id": device}
    finally:
        world.bound_device_id = device


def bound_device(group: Any) -> torch.device | None:
    """The device to which the group was bound where it was made."""
    return getattr(group, "bound_device_id", None)


def device_types(group: Any) -> list[str]:
    """Of tensors that the group carries: of "nccl" and "cuda:nccl" ["cuda"]; of "cpu:gloo,cuda:nccl", and where no
    backend was named, "cpu" too."""
    return [device.type for device in group._device_types]


def carries_nothing(group: Any) -> bool:
    """Whether it is of torch's backend "fake", on whatever devices."""
    return {part.rpartition(":")[2] for part in dist.get_backend(group).split(",")} == {"fake"}


def sends_in_batches(group: Any, device: torch.device) -> bool:
    """Whether messages that are posted together go together, as NCCL's do: none before all of their ranks are there."""
    return bool(group._get_backend(device).supports_coalescing)


# (whole, mine, group=, async_op=): one message to all; its name from torch 2.13 on.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def waited(x: AsyncCollectiveTensor) -> Tensor:
    """The plain tensor that it becomes; its gradient is handed on."""
    found: Tensor = _Waited.apply(x)  # type: ignore[no-untyped-call]
    return found


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        found: Tensor = x.trigger_wait()
        return found

    @staticmethod
    @never_compiled
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
