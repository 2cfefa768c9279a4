"""The process groups of meshes: the one that a program names a mesh by, and the one that carries its messages."""

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

# The groups that programs name meshes by, by ranks, as they came; of the world that is.
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], list[str]]] = WeakKeyDictionary()

# Groups that could not be made, with what was said of it, and how often each was to be; of the world that is.
_failed: WeakKeyDictionary[Any, dict[tuple[str, float], str]] = WeakKeyDictionary()
_tries: WeakKeyDictionary[Any, Counter[tuple[str, float]]] = WeakKeyDictionary()


def _default() -> str:
    world: Any = dist.group.WORLD
    return str(world.group_name)


def group_of(device_mesh: DeviceMesh | None) -> str:
    """The name of the process group that the program has for it, the same on all its ranks."""
    default = _default()
    if device_mesh is None:
        return default
    try:
        return str(device_mesh.get_group().group_name)
    except RuntimeError:  # made without groups: there is no other that it could be told from
        return default


def name_of(ranks: tuple[int, ...], world: tuple[int, ...], group: str) -> str:
    """Of a mesh: its ranks, and the number of its group among those of the same ranks."""
    base = "world" if ranks == world else "ranks:" + ",".join(map(str, ranks))
    first = [_default()] if ranks == world else []
    groups = _groups.setdefault(dist.group.WORLD, {}).setdefault(ranks, first)
    if group not in groups:
        groups.append(group)
    number = groups.index(group)
    return f"{base} ({number + 1})" if number else base


def met_group(name: str, ranks: Sequence[int], timeout: float) -> Any:
    """The group that carries the messages of mesh `name`. Raises RingCommError where a rank does not come, at once
    where one has not come before: those that did are not at the same group any more."""
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
        missing = missing_of(store, keys)
        failed[name, timeout] = (
            f"mesh {name!r} of ranks {list(ranks)} was not made in {time.monotonic() - began:.1f} s: "
            f"{f'ranks {missing} did not come' if missing else first_line(error)}. They died while they compiled, or "
            "make other calls; look at their output, and restart the ranks"
        )
        raise RingCommError(failed[name, timeout]) from error


def missing_of(store: Any, keys: dict[int, str]) -> list[int]:
    try:
        return [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:  # with the process that keeps the store
        return []


def new_group(ranks: Sequence[int], timeout: float) -> Any:
    """Only the members of a part of the world make its group: the others may be busy with other meshes. Raises
    OptionError."""
    part, ordered = len(ranks) < dist.get_world_size(), list(ranks) == sorted(ranks)
    if not ordered and not keeps_order_of_ranks():
        raise OptionError(
            f"the mesh holds ranks {list(ranks)}, and torch {torch.__version__} makes groups in ascending order only; "
            "use torch 2.12 or later, or a mesh in that order"
        )
    return made_by_torch(ranks, timedelta(seconds=timeout), members_only=part)
