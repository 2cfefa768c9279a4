"""Rows of a tensor by their numbers: copied as they lie where they are a few runs, one by one where they are not.

    rows 5, 6, 7, 20, 21    ->    5:8, 20:22

What a layout gives a rank is a run a chunk, and a shift of that is too. Copied row by row, each number is looked up for
each row of every other dim, which takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

FEW = 32  # runs that are worth a copy each


@dataclass(frozen=True, eq=False)
class Rows:
    """`numbers`, in order; `runs` of them as (first, count), or none where there are too many."""

    numbers: Tensor
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, numbers: Tensor, device: torch.device) -> Rows:
        """`numbers` are on the CPU."""
        (cut,) = runs_of([numbers]) or ([],)
        return cls(numbers.to(device), tuple(cut))

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, x: Tensor, dim: int) -> Tensor:
        """These rows of `x`; a view where they are one run."""
        if not self.runs:
            return x.index_select(dim, self.numbers)
        parts = [x.narrow(dim, first, count) for first, count in self.runs]
        return torch.cat(parts, dim) if len(parts) > 1 else parts[0]

    def write(self, out: Tensor, dim: int, part: Tensor) -> None:
        """They become those of `part`."""
        if not self.runs:
            out.index_copy_(dim, self.numbers, part)
        for (first, count), piece in self.paired(part, dim):
            out.narrow(dim, first, count).copy_(piece)

    def add(self, out: Tensor, dim: int, part: Tensor) -> None:
        """Those of `part` are added, to a row as often as it stands here."""
        if not self.runs:
            out.index_add_(dim, self.numbers, part)
        for (first, count), piece in self.paired(part, dim):
            out.narrow(dim, first, count).add_(piece)

    def paired(self, part: Tensor, dim: int) -> list[tuple[tuple[int, int], Tensor]]:
        """Each run with its rows of `part`."""
        pieces = part.split([count for _, count in self.runs], dim) if self.runs else ()
        return list(zip(self.runs, pieces, strict=True))


def runs_of(numbers: Sequence[Tensor]) -> list[list[tuple[int, int]]] | None:
    """Lists of equally many numbers, all cut where one of them does not go on by one: each as (first, count); None
    where that makes too many parts."""
    steps = torch.stack([rows.diff() != 1 for rows in numbers]).any(0)
    if len(numbers[0]) == 0 or int(steps.sum()) >= FEW:
        return None
    edges = [0, *(steps.nonzero()[:, 0] + 1).tolist(), len(numbers[0])]
    return [[(int(rows[a]), b - a) for a, b in pairwise(edges)] for rows in numbers]


def paired_rows(one: Tensor, other: Tensor, device: torch.device) -> tuple[Rows, Rows]:
    """Two lists of rows that go together, in runs of the same sizes."""
    found = runs_of([one, other])
    cut = [(), ()] if found is None else [tuple(runs) for runs in found]
    return Rows(one.to(device), cut[0]), Rows(other.to(device), cut[1])


def copy_rows(x: Tensor, source: Rows, out: Tensor, target: Rows, dim: int) -> None:
    """Rows `source` of `x` become rows `target` of `out`, which go together with them."""
    for (first, count), (there, _) in zip(source.runs, target.runs, strict=True):
        out.narrow(dim, there, count).copy_(x.narrow(dim, first, count))
    if not source.runs:
        target.write(out, dim, source.read(x, dim))


def add_rows(x: Tensor, source: Rows, out: Tensor, target: Rows, dim: int) -> None:
    """Rows `source` of `x` are added to rows `target` of `out`, which go together with them."""
    for (first, count), (there, _) in zip(source.runs, target.runs, strict=True):
        out.narrow(dim, there, count).add_(x.narrow(dim, first, count))
    if not source.runs:
        target.add(out, dim, source.read(x, dim))
