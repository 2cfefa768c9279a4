"""Dims along which a recurrence is many, each of which knows nothing of the others: the batch, heads, channels.

    body: S' = S * a + k.mT @ v     S [B, H, K, V], a [B, H, 1, 1], k [B, H, C, K], v [B, H, C, V]
    ->  B is dim 0 of all four, H dim 1 of all four; V is dim 3 of S and v, and no dim of a and k

Read off the rules by which dims are followed through operators (ringopt/dims), whatever a step computes: it need not be
affine. A dim is such a one where no node sums over it, moves it, or meets it with another of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch.fx as fx

from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.scans.body import Body, NoBody
from ringopt.scans.trace import Kinds, sized


@dataclass(frozen=True)
class Independent:
    """Its size, and which dim it is of each input and each output of a body; None where that is the same for all."""

    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


class _Dependent(Exception):
    """Indices along the dim meet."""


@lru_cache(maxsize=1024)
def independent_dims(text: str, kinds: Kinds) -> tuple[Independent, ...]:
    """Of the body `text` on operands of such kinds: all that every carry and every y has, larger ones first."""
    try:
        body = sized(text, kinds)
    except NoBody:
        return ()
    found = (_along(body, dim, size) for dim, size in enumerate(shape_of(body.inputs[0])) if size > 1)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.size))


def _along(body: Body, dim: int, size: int) -> Independent | None:
    try:
        dims = _Followed(body, size).from_carry(dim)
    except _Dependent:
        return None
    outputs = tuple(dims.get(node) for node in body.outputs)
    return Independent(size, tuple(dims.get(node) for node in body.inputs), outputs) if None not in outputs else None


class _Followed:
    """Which dim of each value it is, as far as is known."""

    def __init__(self, body: Body, size: int):
        self.body, self.size = body, size
        self.calls = [node for node in body.module.graph.nodes if node.op == "call_function"]
        self.dims: dict[fx.Node, int] = {}

    def from_carry(self, dim: int) -> dict[fx.Node, int]:
        """Where it is dim `dim` of the first carry. Raises _Dependent."""
        carries = list(zip(self.body.inputs, self.body.outputs[: self.body.carries], strict=False))
        self.note(self.body.inputs[0], dim)
        known = 0
        while known < len(self.dims):
            known = len(self.dims)
            for before, behind in carries:
                for one, other in ((before, behind), (behind, before)):
                    if one in self.dims:
                        self.note(other, self.dims[one])
            for node in self.calls:
                self.follow(node)
        return self.dims

    def note(self, node: fx.Node, dim: int) -> None:
        if self.dims.setdefault(node, dim) != dim:
            raise _Dependent

    def follow(self, node: fx.Node) -> None:
        """From the operands of a node to it, and back. An operand that does not run along is the same for all."""
        operands = list(tensor_args(node))
        along = [place for place, x in enumerate(operands) if x in self.dims]
        if not along and node not in self.dims:
            return
        rule = rule_of(node)
        if rule is None or len(rule.operands) != len(operands):
            raise _Dependent
        for place in along:
            out = rule.push(place, self.at(self.dims[operands[place]]))
            if out is None or out.outer * out.inner != 1:
                raise _Dependent
            self.note(node, out.dim)
        for place, wanted in enumerate(rule.pull(self.at(self.dims[node])) or [None] * len(operands)):
            if wanted is not None and wanted.outer * wanted.inner == 1:
                self.note(operands[place], wanted.dim)
            elif wanted is not None or operands[place] in self.dims:
                raise _Dependent

    def at(self, dim: int) -> Sharded:
        return Sharded(dim, 1, self.size, 1)
