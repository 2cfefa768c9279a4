"""A mesh that is another one but for what a benchmark changes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringopt.distributed.mesh import Mesh, Transfer


class Wrapped(Mesh):
    """A mesh that hands every call on to another one; subclasses delay or count messages."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh, self.device = mesh, mesh.device

    @property
    def name(self) -> str:
        return f"{type(self).__name__}:{self.mesh.name}"

    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def size(self) -> int:
        return self.mesh.size

    def attend(self) -> None:
        self.mesh.attend()

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        return self.mesh._post(sends, receives, label)

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        return self.mesh._all_gather(x, label)

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return self.mesh._all_reduce(x, label)

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        return self.mesh._start_all_reduce(x, label)

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        return self.mesh._start_all_gather(x, label)
