"""Stretches of a graph in which the same ops come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx
import torch.nn.functional as F

from ringopt.recognize.scans.operands import Token

# Of an iteration. Nothing that is known has bodies as long as that, and the search is of nodes times this.
LONGEST_PERIOD = 600
FEWEST_STEPS = 3


@dataclass(frozen=True)
class Repeat:
    """Calls number `start` to `end` of a graph, each of which is as the one `period` calls behind it."""

    start: int
    end: int
    period: int

    def within(self, other: Repeat) -> bool:
        return other.start <= self.start and self.end <= other.end and self.period % other.period == 0


def calls_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls of a graph."""
    return [node for node in graph.nodes if node.op == "call_function"]


def stretches(tokens: Sequence[Token]) -> list[Repeat]:
    """Of two periods and something of a third at least, for the last iteration may lack what nobody reads. Short ones
    come first."""
    numbers: dict[Token, int] = {}
    seen = torch.tensor([numbers.setdefault(each, len(numbers)) for each in tokens], dtype=torch.int64)
    found = []
    for period in range(1, min(LONGEST_PERIOD, len(seen) // 2) + 1):
        same = F.pad((seen[:-period] == seen[period:]).to(torch.int8), (1, 1))
        edges = same.diff()
        starts, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
        for start, end in zip(starts, ends, strict=True):
            if end - start > (FEWEST_STEPS - 2) * period:
                found.append(Repeat(start, end + period, period))
    return found
