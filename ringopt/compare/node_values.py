"""A graph run node by node, and how far two values are apart.

    for node, value in SteppedGraph(gm).values(inputs): ...

A value is dropped after its last reader, as an interpreter of torch.fx does, so two graphs can be run beside each other
and their values compared as they come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import is_random
from ringopt.torch_compat.schema import OpOverload, schema_of

# By which share of its largest element a value may differ, where nothing is computed in a coarser dtype.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
COARSE = 0.5  # of any other floating dtype
ENTRIES = 1 << 22  # compared at a time: a value is not held once more in float64


class SteppedGraph(fx.Interpreter):
    """Runs `gm`, one node a step. What it draws at random is as if nobody drew between its steps."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm)
        operators = [node.target for node in gm.graph.nodes if node.op.startswith("call")]
        self.draws = any(map(is_random, gm.graph.nodes)) or not all(isinstance(op, OpOverload) for op in operators)
        # Where something may be written later, a value that is to be kept has to be copied.
        self.writes = not all(isinstance(op, OpOverload) and not schema_of(op).is_mutable for op in operators)
        self.streams = generator_states() if self.draws else []

    def values(self, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, Any]]:
        """Every node with its value, in order; the output with what is returned."""
        self.args_iter = iter(inputs)
        self.env: dict[fx.Node, Any] = {}
        for node in self.graph.nodes:
            self.env[node] = value = self.step(node)
            yield node, value
            del value
            for read in self.user_to_last_uses.get(node, []):
                del self.env[read]

    def step(self, node: fx.Node) -> Any:
        """The value of one node, drawn from the stream of this run."""
        if not self.draws:
            return self.run_node(node)
        others = generator_states()
        restore_generators(self.streams)
        try:
            return self.run_node(node)
        finally:
            self.streams = generator_states()
            restore_generators(others)


def generator_states() -> list[Tensor]:
    """Of torch's default generators: the CPU's, then those of the GPUs."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def restore_generators(states: Sequence[Tensor]) -> None:
    """What `generator_states` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])


# ---- how far apart ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NodeError:
    """How far a value is from the one that it is compared with.

    largest     the largest absolute difference of two entries; inf where one is NaN or infinite and the other not
    relative    that, over the largest finite magnitude of the other value
    allowed     what the coarser dtype of the two accounts for, relative; 0 of integers
    """

    largest: float
    relative: float
    allowed: float

    @property
    def bad(self) -> bool:
        """Whether it is more than is allowed."""
        return not self.relative <= self.allowed

    def __str__(self) -> str:
        return f"{self.relative:.1e} of its largest element (max abs {self.largest:.1e})"


def error_of(found: Any, expected: Any) -> NodeError | None:
    """Of two tensors, or of two lists of them, their worst; None of what cannot be compared: other sizes, no
    tensors."""
    if isinstance(found, (tuple, list)) and isinstance(expected, (tuple, list)) and len(found) == len(expected):
        parts = [error_of(one, other) for one, other in zip(found, expected, strict=True)]
        known = [part for part in parts if part is not None]
        return max(known, key=lambda part: part.relative, default=None)
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor) or found.shape != expected.shape:
        return None
    largest, scale = largest_difference(found.detach(), expected.detach())
    relative = largest / scale if largest and scale else inf if largest else 0.0
    return NodeError(largest, relative, max(allowed_of(found.dtype), allowed_of(expected.dtype)))


def allowed_of(dtype: torch.dtype) -> float:
    """The share of its largest element by which a value of this dtype may differ."""
    floating = dtype.is_floating_point or dtype.is_complex
    return TOLERANCE.get(dtype.to_real() if dtype.is_complex else dtype, COARSE) if floating else 0.0


def largest_difference(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Of any two entries (inf where one is NaN or infinite and the other is not), and the largest finite magnitude of
    `expected`."""
    wide = torch.complex128 if found.is_complex() or expected.is_complex() else torch.float64
    largest = scale = 0.0
    pairs = zip(found.reshape(-1).split(ENTRIES), expected.reshape(-1).split(ENTRIES), strict=True)
    for part, other in pairs:
        if not part.numel():
            continue
        one, right = part.to(wide), other.to(part.device, wide)
        alike = (one == right) | (one.isnan() & right.isnan())
        worst = torch.where(alike, 0.0, (one - right).abs()).nan_to_num(inf, inf).max()
        largest = max(largest, float(worst))
        scale = max(scale, float(torch.where(right.isfinite(), right.abs(), 0.0).max()))
    return largest, scale
