"""Whether a mesh of another library's tensors (DTensor) stands across that of the sequence, as rows across columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ringopt.distributed.mesh import Mesh
from ringopt.distributed.process import ProcessMesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_across: dict[tuple[str, tuple[int, ...]], str] = {}


def why_not_across(mesh: Mesh, other: DeviceMesh) -> str:
    """Why the ranks of `other` may hold other tokens than this one; "" where all have its place in meshes of their own.
    All ranks of `other` make the first call with it, for they tell each other their places."""
    if not isinstance(mesh, ProcessMesh):  # nothing is sent
        return ""
    members = tuple(other.mesh.flatten().tolist())
    key = mesh.name, members
    if key not in _across:
        shared = sorted({*members} & {*mesh.ranks} - {dist.get_rank()})
        _across[key] = f"ranks {shared} share this rank's sequence too" if shared else _other_places(mesh, other)
    return _across[key]


def _other_places(mesh: Mesh, other: DeviceMesh) -> str:
    for dim in range(other.ndim):
        group = other.get_group(dim)
        places: list[tuple[int, int]] = [(0, 0)] * dist.get_world_size(group)
        dist.all_gather_object(places, (mesh.rank, mesh.size), group)
        if len({*places}) > 1:
            return f"its ranks are numbers {[place for place, _ in places]} of the ranks that share their sequences"
    return ""
