"""A subset of the ranks of a mesh, as a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh, Pending, Transfer


class SubMesh(Mesh):
    """The `ranks` of the mesh `whole`, renumbered in this order; this rank is one of them.

    Messages and collectives are point-to-point messages of `whole`, under its ranks: this takes no process group, whose
    creation would be collective, and errors name the ranks of `whole`.
    """

    def __init__(self, whole: Mesh, ranks: Sequence[int]):
        self.whole, self.ranks, self.device, self.in_flight = whole, ranks, whole.device, whole.in_flight
        self._within, self.recent = whole._within, whole.recent

    @property
    def name(self) -> str:
        return f"ranks {','.join(map(str, self.ranks))} of {self.whole.name}"

    @property
    def rank(self) -> int:
        return self.ranks.index(self.whole.rank)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def logging_rank(self) -> int:
        return self.whole.logging_rank

    def held(self) -> AbstractContextManager[None]:
        return self.whole.held()

    def begin_program(self) -> None:
        self.whole.begin_program()

    def cut_short(self, why: str, kind: str, later: bool = False) -> None:
        self.whole.cut_short(why, kind, later)

    def attend(self) -> None:
        self.whole.attend()

    def meet_on(self, device: torch.device) -> None:
        self.whole.meet_on(device)

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str = ""
    ) -> Pending:
        for peer, _ in (*sends, *receives):
            if not 0 <= peer < self.size:
                raise ValueError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {peer}")
        out, come = ([(self.ranks[peer], buffer) for peer, buffer in way] for way in (sends, receives))
        return self.whole.exchange(out, come, label)

    def all_gather(self, x: Tensor, label: str = "") -> list[Tensor]:
        mine = x.detach().clone(memory_format=torch.contiguous_format)
        parts = [mine if peer == self.rank else torch.empty_like(mine) for peer in range(self.size)]
        others = [(peer, part.view(-1)) for peer, part in enumerate(parts) if peer != self.rank]
        self.exchange([(peer, mine.view(-1)) for peer, _ in others], others, label).wait()
        return parts

    def all_reduce(self, x: Tensor, label: str = "") -> Tensor:
        return torch.stack(self.all_gather(x, label)).sum(0, dtype=x.dtype)

    def _through(self) -> NotImplementedError:
        return NotImplementedError(f"{self.name} has no transport of its own: its messages go through the whole mesh")

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        raise self._through()

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        raise self._through()

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        raise self._through()

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        raise self._through()

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        raise self._through()
