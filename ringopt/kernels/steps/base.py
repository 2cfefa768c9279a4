"""One step of a recurrence, and what runs all of them in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.fx as fx
from torch import Tensor

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class OneStep:
    """`inputs` and `outputs` say what each is: "carry", "row", "const"; "carry", "row", "sum". `keeps`: the carries of
    all steps are results. Each node of `graph` has its fake value."""

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    keeps: bool


class StepKernel(Protocol):
    """All steps in one launch."""

    def run(
        self, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
    ) -> list[Tensor] | None:
        """The last carries. `rows` are stacked along dim 0. `into` has a result for each output of the step, which is
        filled: stacked where it is a row, or a carry that is kept, behind the one that is there. None where this GPU
        has no room for it, and nothing was done."""
        ...
