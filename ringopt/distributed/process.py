"""The mesh over a process group of torch.distributed."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringopt.distributed.mesh import Mesh, Transfer, comm_error, register, registered
from ringopt.errors import OptionError, RingCommError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DEFAULT_TIMEOUT = 600.0

T = TypeVar("T")


class ProcessMesh(Mesh):
    """Ranks of one process group, numbered as in `ranks` (global ranks). The group is the mesh's own: its timeout holds
    for ringopt's messages only, and they cannot be mistaken for others'."""

    def __init__(self, name: str, ranks: Sequence[int], timeout: float, group: Any):
        super().__init__()
        self._name, self.ranks, self.timeout, self.group = name, tuple(ranks), timeout, group
        self._rank = self.ranks.index(dist.get_rank())
        # The world that the group belongs to: torch.distributed may be shut down and started again.
        self.world = dist.group.WORLD
        self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._apart: ProcessMesh | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def usable(self) -> bool:
        """False once torch.distributed was shut down, also if it was started again since."""
        return dist.is_initialized() and dist.group.WORLD is self.world

    def apart(self) -> Mesh:
        if self._apart is None:
            group = new_group(self.ranks, self.timeout)
            self._apart = ProcessMesh(f"{self._name} apart", self.ranks, self.timeout, group)
            register(self._apart)
        return self._apart

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        # batch_isend_irecv posts in the order of this list on gloo, and all at once on NCCL, where receives posted
        # alone would wait on the stream for sends that stand behind them.
        ops = [dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=peer) for peer, buffer in receives]
        ops += [dist.P2POp(dist.isend, buffer, group=self.group, group_peer=peer) for peer, buffer in sends]
        whats = [f"receive of {buffer.nbytes} bytes from rank {peer}" for peer, buffer in receives]
        whats += [f"send of {buffer.nbytes} bytes to rank {peer}" for peer, buffer in sends]
        works = self._guarded(label, ", ".join(whats), lambda: dist.batch_isend_irecv(ops))
        if len(works) != len(ops):
            whats = [", ".join(whats)] * len(works)
        return [Transfer(what, work) for what, work in zip(whats, works, strict=True)]

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        if not x.numel():
            return [torch.empty_like(x) for _ in self.ranks]
        parts, transfer = self._start_all_gather(x, label)
        self._guarded(label, transfer.what, transfer.work.wait)
        return parts

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        # As bytes: gloo gathers no bool and no complex numbers.
        mine = x.contiguous().view(-1).view(torch.uint8)
        whole = mine.new_empty(self.size * mine.numel())
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
        what = f"all_gather of {x.nbytes} bytes with global ranks {self.ranks}"
        work = self._guarded(label, what, lambda: gather(whole, mine, group=self.group, async_op=True))
        return [part.view(x.dtype).view(x.shape) for part in whole.split(mine.numel())], Transfer(what, work)

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        what = f"all_reduce of {x.nbytes} bytes with global ranks {self.ranks}"
        self._guarded(label, what, lambda: dist.all_reduce(total, group=self.group))
        return total

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        what = f"all_reduce of {x.nbytes} bytes with global ranks {self.ranks}"
        work = self._guarded(label, what, lambda: dist.all_reduce(x, group=self.group, async_op=True))
        return Transfer(what, work)

    def _guarded(self, label: str, what: str, call: Callable[[], T]) -> T:
        if not self.usable:
            raise RingCommError(
                f"mesh {self._name!r} belongs to a process group that was destroyed; make it again with "
                "ringopt.distributed.process.process_mesh"
            )
        begin = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            raise comm_error(self, label, what, begin, error) from error


_cached: dict[tuple[tuple[int, ...], float], ProcessMesh] = {}


def process_mesh(device_mesh: DeviceMesh | None = None, timeout_s: float | None = None) -> ProcessMesh:
    """The mesh over the ranks of a 1-D `device_mesh` (None: the whole world), registered under its name.

    A message that does not arrive within `timeout_s` seconds is an error; None takes the mesh that these ranks have
    already, or else 600 seconds. The first call with new ranks or a new timeout makes a process group: all ranks of the
    mesh must make that call, in the same order. Raises OptionError.
    """
    if not dist.is_initialized():
        raise OptionError(
            "a mesh over processes was asked for, and torch.distributed is not initialized: run under torchrun and "
            "call torch.distributed.init_process_group first"
        )
    world = tuple(range(dist.get_world_size()))
    ranks = world if device_mesh is None else tuple(device_mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise OptionError(f"this is rank {dist.get_rank()}, and the mesh holds ranks {list(ranks)}")
    for key in [key for key, mesh in _cached.items() if not mesh.usable]:
        del _cached[key]
    name = "world" if ranks == world else "ranks:" + ",".join(map(str, ranks))
    mesh = _registered(name) if timeout_s is None else _cached.get((ranks, timeout_s))
    if mesh is None:
        timeout = DEFAULT_TIMEOUT if timeout_s is None else timeout_s
        mesh = _cached[ranks, timeout] = ProcessMesh(name, ranks, timeout, new_group(ranks, timeout))
    register(mesh)
    return mesh


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


def _registered(name: str) -> ProcessMesh | None:
    mesh = registered(name)
    return mesh if isinstance(mesh, ProcessMesh) and mesh.usable else None
