"""Look-up of meshes: by name, and by the process group of a DeviceMesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from ringopt.distributed.groups import group_of, met_group, name_of
from ringopt.distributed.mesh import ANY, Mesh, PretendedMesh, known, register, registered
from ringopt.distributed.process import ProcessMesh
from ringopt.errors import OptionError, RingCommError
from ringopt.options import check_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = 600.0

_cached: dict[tuple[str, float], ProcessMesh] = {}


def process_mesh(device_mesh: DeviceMesh | None = None, timeout_s: float | None = None) -> ProcessMesh:
    """The mesh over the ranks of a 1-D `device_mesh` (None: the whole world), registered under its name.

    A message that does not arrive within `timeout_s` seconds is an error; None takes the mesh that these ranks already
    have, or else 600 seconds. A `device_mesh` of another process group is another mesh, also over the same ranks.
    The first call with new ranks, a new group or a new timeout makes a process group: all ranks of the mesh must make
    that call, in the same order. Raises OptionError, RingMismatchError.
    """
    if device_mesh is not None:
        check_mesh(device_mesh, "mesh")
    if not dist.is_initialized():
        raise OptionError(
            "a mesh over processes was asked for, and torch.distributed is not initialized: run under torchrun and "
            "call torch.distributed.init_process_group first"
        )
    world = tuple(range(dist.get_world_size()))
    ranks = world if device_mesh is None else tuple(device_mesh.mesh.flatten().tolist())
    for key in [key for key, mesh in _cached.items() if not mesh.usable]:
        del _cached[key]
    group = group_of(device_mesh)
    name = name_of(ranks, world, group)
    mesh = _registered(name) if timeout_s is None else _cached.get((name, timeout_s))
    if mesh is None:
        timeout = DEFAULT_TIMEOUT if timeout_s is None else timeout_s
        mesh = _cached[name, timeout] = ProcessMesh(name, ranks, timeout, met_group(name, ranks, timeout), group)
    register(mesh)
    return mesh


def _registered(name: str) -> ProcessMesh | None:
    mesh = registered(name)
    return mesh if isinstance(mesh, ProcessMesh) and mesh.usable else None


def mesh_of(name: str) -> Mesh:
    """The mesh registered as `name`; "pretend:RANK/SIZE" needs no registration. Raises RingCommError."""
    if name.startswith("pretend:"):
        return _pretended(name)
    mesh = registered(name)
    if mesh is None and name == ANY:
        return _whoever_runs()
    if mesh is None:
        raise RingCommError(
            f"no mesh {name!r} in this process; known are {known() or 'none'}. Start the process group "
            "(torch.distributed.init_process_group) and make the mesh (ringopt.distributed.lookup.process_mesh) first"
        )
    return mesh


def _whoever_runs() -> Mesh:
    if dist.is_available() and dist.is_initialized():
        return process_mesh()
    return _pretended("pretend:0/1")


def _pretended(name: str) -> PretendedMesh:
    place = name.removeprefix("pretend:").split("/")
    if len(place) == 2 and all(number.isdecimal() for number in place):
        rank, size = map(int, place)
        if rank < size:
            return PretendedMesh(rank, size)
    raise ValueError(f"mesh name {name!r}: expected pretend:RANK/SIZE with RANK below SIZE, such as pretend:0/8")
