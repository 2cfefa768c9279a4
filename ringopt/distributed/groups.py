"""The process groups of meshes: the program's group that identifies a mesh, and the group that carries its messages."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringopt.errors import OptionError, RingCommError, first_line
from ringopt.torch_compat.distributed import default_store, device_types, keeps_order_of_ranks
from ringopt.torch_compat.distributed import new_group as made_by_torch
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SLACK = 0.02  # seconds: gloo waits for whole milliseconds, and a wait that ends early is a rank that has ended

# World -> ranks -> names of the program's groups of these ranks, in order of first use.
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], list[str]]] = WeakKeyDictionary()

# World -> (mesh, timeout) -> the error of a group that could not be made, and the number of tries.
_failed: WeakKeyDictionary[Any, dict[tuple[str, float], str]] = WeakKeyDictionary()
_tries: WeakKeyDictionary[Any, Counter[tuple[str, float]]] = WeakKeyDictionary()

# Messages of meetings that failed: dropped, they would not be sent, and a rank that comes later would wait for them.
_posted: list[list[tuple[int, Any]]] = []


def _default() -> str:
    world: Any = dist.group.WORLD
    return str(world.group_name)


def group_of(device_mesh: DeviceMesh | None) -> str:
    """The name of the program's process group of a mesh, the default group without one; the same on all its ranks."""
    default = _default()
    if device_mesh is None:
        return default
    try:
        return str(device_mesh.get_group().group_name)
    except RuntimeError:  # a mesh made without groups
        return default


def name_of(ranks: tuple[int, ...], world: tuple[int, ...], group: str) -> str:
    """The name of a mesh: its ranks, and the index of its group among the groups of the same ranks."""
    base = "world" if ranks == world else "ranks:" + ",".join(map(str, ranks))
    first = [_default()] if ranks == world else []
    groups = _groups.setdefault(dist.group.WORLD, {}).setdefault(ranks, first)
    if group not in groups:
        groups.append(group)
    number = groups.index(group)
    return f"{base} ({number + 1})" if number else base


def met_group(name: str, ranks: Sequence[int], timeout: float) -> Any:
    """A new group that carries the messages of mesh `name`; collective. Raises RingCommError where a rank does not join
    within `timeout` seconds, at once where its process has ended, as far as gloo sees that, and where one has failed
    to before: the ranks are out of step then."""
    failed = _failed.setdefault(dist.group.WORLD, {})
    if (name, timeout) in failed:
        raise RingCommError(failed[name, timeout])
    store, began = default_store(), time.monotonic()
    tries = _tries.setdefault(dist.group.WORLD, Counter())
    tries[name, timeout] += 1
    meeting = f"ringopt comes {name} {timeout} {tries[name, timeout]}"
    keys = {rank: f"{meeting} {rank}" for rank in ranks}
    try:
        store.set(keys[dist.get_rank()], "")
        await_all(ranks, meeting, timeout)
        return new_group(ranks, timeout)
    except RuntimeError as error:
        failed[name, timeout] = (
            f"mesh {name!r} of ranks {list(ranks)} was not made in {time.monotonic() - began:.1f} s: "
            f"{_why(error, _missing(store, keys))}. They died while they compiled, or "
            "make other calls; look at their output, and restart the ranks"
        )
        raise RingCommError(failed[name, timeout]) from error


class Ended(RuntimeError):
    """The process of a rank has ended, or its connections have."""

    def __init__(self, rank: int):
        super().__init__(f"the process of rank {rank} has ended")
        self.rank = rank


def _why(error: RuntimeError, missing: list[int]) -> str:
    """What kept ranks from meeting. Where one has ended, the others may still be on their way."""
    if not isinstance(error, Ended):
        return f"ranks {missing} did not come" if missing else first_line(error)
    late = [rank for rank in missing if rank != error.rank]
    return first_line(error) + (f", and ranks {late} had not come by then" if late else "")


def await_all(ranks: Sequence[int], meeting: str, timeout: float) -> None:
    """A byte from each of `ranks` to each other one, through the program's group; where that has no gloo, nothing. A
    rank that is late may still compile; one that has died never comes, and a receive from it fails at once.

    `meeting` is equal on all ranks, and of this call alone. Raises Ended, or RuntimeError after `timeout` seconds."""
    others = [rank for rank in ranks if rank != dist.get_rank()]
    if not others or not has_gloo():
        return
    tag, end = zlib.crc32(meeting.encode()) >> 1, time.monotonic() + timeout
    with unset_fake_temporarily():  # a mesh may be made while a graph is traced
        here = torch.zeros(1, dtype=torch.uint8, device="cpu")
        started: list[tuple[int, Any]] = []
        ended: list[RuntimeError] = []
        for post in (dist.isend, dist.irecv):
            for rank in others:
                try:
                    with _ends(rank, end):
                        started.append((rank, post(here.clone(), rank, tag=tag)))
                except Ended as error:  # the others still wait for this rank
                    ended.append(error)
        try:
            if ended:
                raise ended[0]
            for rank, message in started:
                with _ends(rank, end):
                    message.wait(timedelta(seconds=max(end - time.monotonic(), 0.0) + SLACK))
        except RuntimeError:
            _posted.append(started)
            raise


@contextmanager
def _ends(rank: int, end: float) -> Iterator[None]:
    """An error of the transport before `end` is that `rank` has ended."""
    try:
        yield
    except RuntimeError as error:
        if time.monotonic() < end:
            raise Ended(rank) from error
        raise


def has_gloo() -> bool:
    """Whether the program's group carries tensors of the CPU by gloo."""
    world = dist.group.WORLD
    return "cpu" in device_types(world) and "gloo" in dist.get_backend(world)


def _missing(store: Any, keys: dict[int, str]) -> list[int]:
    try:
        return [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:  # with the process that keeps the store
        return []


def new_group(ranks: Sequence[int], timeout: float) -> Any:
    """A process group of `ranks`, made by its members only: other ranks may be busy with other meshes. Raises
    OptionError for an order of ranks that torch cannot keep."""
    part, ordered = len(ranks) < dist.get_world_size(), list(ranks) == sorted(ranks)
    if not ordered and not keeps_order_of_ranks():
        raise OptionError(
            f"the mesh holds ranks {list(ranks)}, and torch {torch.__version__} makes groups in ascending order only; "
            "use torch 2.12 or later, or a mesh in that order"
        )
    return made_by_torch(ranks, timedelta(seconds=timeout), members_only=part)
