"""The peers in `ringopt bench memory`: each in the form that holds least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from ringopt.context_parallel.geometry.layouts import Layout, layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.cost.choose import Case
from ringopt.cost.simulate import Heads
from ringopt.distributed.mesh import Mesh
from ringopt.tools.benchmarks.lab.names import PEERS, TORCH, equal_shards
from ringopt.tools.benchmarks.lab.peers import Run, all_gather, torch_ring


@dataclass(frozen=True)
class Peer:
    """An attention, and who does it, over the default process group."""

    case: Case
    strategy: str
    ranks: int

    calls: ClassVar[int] = 3

    @property
    def label(self) -> str:
        return self.case.pattern

    @property
    def trains(self) -> bool:
        """Torch's ring has no backward on the CPU."""
        return self.strategy not in TORCH

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        balanced = self.strategy in TORCH and self.case.pattern == "causal"
        layout = layout_of("zigzag" if balanced else "contiguous", self.case.q_length, self.ranks)
        return layout, layout

    def on(self, mesh: Mesh) -> Run:
        """With a mask of numbers that is there before: SDPA would make one of a mask of booleans at each call."""
        pattern, length = self.case.pattern, self.case.q_length
        if self.strategy in TORCH:
            return torch_ring(dist.group.WORLD, pattern == "causal", TORCH[self.strategy])
        if pattern == "full":
            return all_gather(None, at_once=False)
        (mine,) = self.layouts[0].ranges(mesh.rank)
        mask = seen(pattern_of(pattern, length, length), mine, range(length))
        return all_gather(torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), at_once=False)


def peers(ranks: int, length: int, heads: Heads, patterns: Sequence[str]) -> Iterator[Peer]:
    """Those that can do the pattern, of which torch's ring has no window."""
    for pattern in patterns if equal_shards(length, ranks) else ():
        for who in PEERS if pattern in ("full", "causal") else (who for who in PEERS if who not in TORCH):
            yield Peer(Case(pattern, length, length, heads, True), who, ranks)
