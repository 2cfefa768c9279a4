"""The process groups of meshes: the program's group that identifies a mesh, and the group that carries its messages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringopt.errors import OptionError, RingCommError, first_line
from ringopt.torch_compat.distributed import default_store, keeps_order_of_ranks
from ringopt.torch_compat.distributed import new_group as made_by_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# World -> ranks -> names of the program's groups of these ranks, in order of first use.
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], list[str]]] = WeakKeyDictionary()

# World -> (mesh, timeout) -> the error of a group that could not be made, and the number of tries.
_failed: WeakKeyDictionary[Any, dict[tuple[str, float], str]] = WeakKeyDictionary()
_tries: WeakKeyDictionary[Any, Counter[tuple[str, float]]] = WeakKeyDictionary()


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
    within `timeout` seconds, and at once where one has failed to before: the ranks are out of step then."""
    failed = _failed.setdefault(dist.group.WORLD, {})
    if (name, timeout) in failed:
        raise RingCommError(failed[name, timeout])
    store, began = default_store(), time.monotonic()
    tries = _tries.setdefault(dist.group.WORLD, Counter())
    tries[name, timeout] += 1
    keys = {rank: f"ringopt comes {name} {timeout} {tries[name, timeout]} {rank}" for rank in ranks}
    try:
        store.set(keys[dist.get_rank()], "")
        return new_group(ranks, timeout)
    except RuntimeError as error:
        missing = _missing(store, keys)
        failed[name, timeout] = (
            f"mesh {name!r} of ranks {list(ranks)} was not made in {time.monotonic() - began:.1f} s: "
            f"{f'ranks {missing} did not come' if missing else first_line(error)}. They died while they compiled, or "
            "make other calls; look at their output, and restart the ranks"
        )
        raise RingCommError(failed[name, timeout]) from error


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
