"""What the segments of a recurrence tell each other: one all-gather, in the order of the steps on every rank.

posted = messages.post(parts, "maps of a scan")      parts: of this rank's segments
every = messages.arrived(posted)                     of all segments, in order
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Layout
from ringopt.distributed.mesh import Mesh, Pending


@dataclass(frozen=True)
class PostedSegments:
    """An all-gather under way: its parts by rank are there when `pending` has been waited for."""

    parts: Sequence[Tensor]
    pending: Pending


@dataclass(frozen=True)
class SegmentMessages:
    """Between the ranks of `mesh`, whose segments `layout` has."""

    layout: Layout
    mesh: Mesh

    def post(self, parts: Sequence[Tensor], label: str) -> PostedSegments:
        """Starts the all-gather of what this rank's segments have to tell, of one size each."""
        return PostedSegments(*self.mesh.start_all_gather(torch.stack(list(parts)), label))

    def arrived(self, posted: PostedSegments) -> list[Tensor]:
        """What every segment has to tell, in order. Raises RingCommError."""
        posted.pending.wait()
        found = [posted.parts[0][0]] * (self.layout.chunks_per_rank * self.layout.ranks)
        for rank, of_rank in enumerate(posted.parts):
            for number, part in zip(self.layout.chunks(rank), of_rank, strict=True):
                found[number] = part
        return found

    def gathered(self, parts: Sequence[Tensor], label: str) -> list[Tensor]:
        """Both, one after the other."""
        return self.arrived(self.post(parts, label))
