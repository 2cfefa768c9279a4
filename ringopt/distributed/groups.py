"""The process groups of meshes: the one that a program names a mesh by, and the one that carries its messages."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ringopt.errors import OptionError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The groups that programs name meshes by, by ranks, as they came; of the world that is.
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], list[str]]] = WeakKeyDictionary()


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


def new_group(ranks: Sequence[int], timeout: float) -> Any:
    """Only the members of a part of the world make its group: the others may be busy with other meshes. Raises
    OptionError."""
    part, ordered = len(ranks) < dist.get_world_size(), list(ranks) == sorted(ranks)
    # Below torch 2.12 the ranks of a group are always in ascending order.
    keeps_order = "sort_ranks" in inspect.signature(dist.new_group).parameters
    if not ordered and not keeps_order:
        raise OptionError(
            f"the mesh holds ranks {list(ranks)}, and torch {torch.__version__} makes groups in ascending order only; "
            "use torch 2.12 or later, or a mesh in that order"
        )
    order: dict[str, Any] = {"sort_ranks": False} if keeps_order else {}
    return dist.new_group(list(ranks), timedelta(seconds=timeout), use_local_synchronization=part, **order)
