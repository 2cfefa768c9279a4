"""Process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ringopt.torch_compat.distributed import (
    AsyncCollectiveTensor,
    all_gather_single,
    bound_device,
    carries_nothing,
    default_store,
    device_types,
    keeps_order_of_ranks,
    new_group,
    sends_in_batches,
    store_of,
    waited,
)


def groups() -> dict[str, Any]:
    rank = dist.get_rank()
    default_store().set(f"compat {rank}", "here")
    dist.barrier()
    met = default_store().check(["compat 0", "compat 1"])
    order = [1, 0] if keeps_order_of_ranks() else [0, 1]
    group = new_group(order, timedelta(seconds=60), members_only=False)
    counted = store_of(group).add("compat count", 1)
    dist.barrier()
    apart = not default_store().check(["compat count"])
    total = store_of(group).add("compat count", 0)
    whole = torch.empty(2, dtype=torch.int64)
    all_gather_single(whole, torch.tensor([rank]), group=group, async_op=True).wait()
    found = dist.get_process_group_ranks(group)
    return {"met": met, "counted": counted, "apart": apart, "total": total, "whole": whole.tolist(), "order": found}


def test_stores_and_groups(ranks: Callable[..., list[Any]]) -> None:
    found = ranks(2, groups)
    order = [1, 0] if keeps_order_of_ranks() else [0, 1]
    for each in found:
        assert each["met"] and each["apart"] and each["total"] == 2
        assert each["order"] == each["whole"] == order
    assert {each["counted"] for each in found} == {1, 2}


def test_what_depends_on_the_release() -> None:
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    assert keeps_order_of_ranks() == (release >= (2, 12))
    assert all_gather_single.__name__ == ("all_gather_single" if release >= (2, 13) else "all_gather_into_tensor")


def of_gloo() -> tuple[Any, ...]:
    world, cpu = dist.group.WORLD, torch.device("cpu")
    here = device_types(world), bound_device(world), carries_nothing(world), sends_in_batches(world, cpu)
    world.bound_device_id = torch.device("cuda:1")  # type: ignore[union-attr]
    bound = bound_device(world)
    world.bound_device_id = None  # type: ignore[union-attr]
    return *here, bound


def test_what_a_group_carries(ranks: Callable[..., list[Any]]) -> None:
    """Gloo sends each message by itself, and is bound to no device."""
    for types, unbound, nothing, batches, bound in ranks(2, of_gloo):
        assert "cpu" in types and (unbound, nothing, batches, bound) == (None, False, False, torch.device("cuda:1"))


def pending() -> dict[str, Any]:
    """A sum that is on its way, of what has a gradient."""
    x = torch.ones(2, requires_grad=True)
    mesh = init_device_mesh("cpu", (2,))
    spread = DTensor.from_local(2 * x, mesh, [Partial()])
    local = spread.redistribute(placements=[Replicate()], async_op=True).to_local()
    found = waited(local)
    found.sum().backward()
    kinds = (isinstance(local, AsyncCollectiveTensor), type(found) is torch.Tensor)
    return {"kinds": kinds, "value": found.tolist(), "gradient": x.grad.tolist()}


def test_what_a_collective_will_give_becomes_a_plain_tensor(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(2, pending):
        assert found == {"kinds": (True, True), "value": [4.0, 4.0], "gradient": [2.0, 2.0]}
