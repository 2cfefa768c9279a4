"""Groups whose tensors are on devices, without a device: groups of torch's backend "fake", which carry nothing and
answer at once, taken for NCCL's; tensors of FakeTensorMode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.distributed import process
from ringopt.distributed.groups import new_group
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import forget_all
from ringopt.distributed.process import ProcessMesh
from ringopt.distributed.submesh import SubMesh
from ringopt.torch_compat import distributed as door

NCCL = ("cuda:fake", "fake")  # as "nccl" or "cuda:nccl", and as "cpu:gloo,cuda:nccl" or no backend named


class Done:
    def wait(self) -> None: ...


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[torch.device]]]:
    """Starts a world of four ranks, of which this is the second; gives the devices of its all-reduces, in order."""
    asked: list[torch.device] = []

    def reduced(x: Tensor, group: Any, async_op: bool) -> Done:
        asked.append(x.device)
        return Done()

    def start(backend: str, bound: torch.device | None = None, batches: bool = True) -> list[torch.device]:
        dist.init_process_group(backend, store=dist.HashStore(), rank=1, world_size=4)
        dist.group.WORLD.bound_device_id = bound  # type: ignore[union-attr]
        monkeypatch.setattr(process, "carries_nothing", lambda group: False)
        monkeypatch.setattr(process, "sends_in_batches", lambda group, device: batches and device.type == "cuda")
        monkeypatch.setattr(process, "unset_fake_temporarily", nullcontext)
        monkeypatch.setattr(process.dist, "all_reduce", reduced)
        # Which ranks are neighbours takes messages, which nobody answers.
        monkeypatch.setattr(ProcessMesh, "_meet", lambda self, made: process.Met(None, False))
        return asked

    with FakeTensorMode():
        yield start
    forget_all()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "devices", "small"), [("cuda:fake", ["cuda"], "cuda"), ("fake", ["cpu", "cuda"], "cpu")]
)
def test_the_group_is_asked_for_its_devices(world: Any, backend: str, devices: list[str], small: str) -> None:
    world(backend)
    mesh = process_mesh()
    assert set(devices) <= set(door.device_types(mesh.group))
    assert mesh.device.type == small, "of small messages: the host where the group has a backend for it"


@pytest.mark.parametrize("backend", NCCL)
def test_no_batch_is_the_first_call(world: Any, backend: str) -> None:
    """Ranks meet on the device of the operands, once for each."""
    asked, mesh = world(backend), process_mesh()
    assert asked == [], "nobody knows yet on which device"
    mesh.meet_on(torch.device("cuda:3"))
    mesh.meet_on(torch.device("cuda", 3))
    SubMesh(mesh, [1, 2]).meet_on(torch.device("cuda:3"))
    mesh.meet_on(torch.device("cpu"))
    mesh.meet_on(torch.device("meta"))
    assert asked == [torch.device("cuda:3")]
    assert mesh.device == torch.device("cuda:3" if backend == "cuda:fake" else "cpu")


@pytest.mark.parametrize("backend", NCCL)
def test_a_bound_world_meets_when_the_mesh_is_made(world: Any, backend: str) -> None:
    asked = world(backend, torch.device("cuda:2"))
    mesh = process_mesh()
    assert asked == [torch.device("cuda:2")]
    assert mesh.device == torch.device("cuda:2" if backend == "cuda:fake" else "cpu")
    assert mesh.apart().device == mesh.device and asked == [torch.device("cuda:2")] * 2


def test_a_group_that_sends_each_message_alone_need_not_meet(world: Any) -> None:
    asked = world("fake", batches=False)
    process_mesh().meet_on(torch.device("cuda:1"))
    assert asked == []


def test_the_current_device_is_meant_where_none_is_named(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = world("cuda:fake")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    process_mesh().meet_on(torch.device("cuda"))
    assert asked == [torch.device("cuda:5")]


# ---- groups of some ranks --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bound", [None, torch.device("cuda:2")])
def test_a_group_of_some_ranks_splits_no_communicator(
    world: Any, bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    world("cuda:fake", bound)
    asked: list[Any] = []
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda group, *_: asked.append(group))
    group = new_group([0, 1], 60.0)
    assert asked == [], "torch would split, and wait for ranks that never come"
    assert door.bound_device(group) == bound, "the new group is bound as the world is"
    assert door.bound_device(dist.group.WORLD) == bound, "and the world still is"
    new_group([0, 1, 2, 3], 60.0)
    assert len(asked) == (bound is not None), "all ranks come to a group of all, which may be split off"


def test_the_world_stays_bound_where_a_group_cannot_be_made(world: Any) -> None:
    world("cuda:fake", torch.device("cuda:2"))
    with pytest.raises(ValueError, match=r"out of range|should be within the world_size"):
        door.new_group([1, 7], timedelta(seconds=60), members_only=True)
    assert door.bound_device(dist.group.WORLD) == torch.device("cuda:2")
