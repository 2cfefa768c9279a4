"""What a rule is: how the dims of an op's output come from the dims of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from ringopt.ir.nodes import is_tensor, shape_of, tensor_args
from ringopt.ir.placement import Sharded, through_view

Dims = dict[int, int]


@dataclass(frozen=True)
class Rule:
    """`operands[i]` maps a dim of the output to the dim of the i-th tensor argument that it runs along with.
    `summed[i]` is the dim of the i-th argument that is contracted with the others' `summed`, or None."""

    operands: tuple[Dims, ...]
    summed: tuple[tuple[int, ...], ...] = ()

    def push(self, index: int, placement: Sharded) -> Sharded | None:
        """Placement of the output when the `index`-th argument has `placement`."""
        for out, dim in self.operands[index].items():
            if dim == placement.dim:
                return placement.at(out)
        return None

    def pull(self, placement: Sharded) -> list[Sharded | None] | None:
        """Placements of the arguments that give an output of `placement`; None where no argument runs along."""
        wanted = [placement.at(dims[placement.dim]) if placement.dim in dims else None for dims in self.operands]
        return wanted if any(wanted) else None

    def sums(self, index: int, placement: Sharded) -> list[Sharded | None] | None:
        """Placements of all arguments when the `index`-th is sharded along a dim that is summed away."""
        if not self.summed or placement.dim not in self.summed[index]:
            return None
        place = self.summed[index].index(placement.dim)
        return [placement.at(dims[place]) if dims else None for dims in self.summed]


@dataclass(frozen=True)
class ViewRule(Rule):
    """A reshape: dims are split and merged, the sequence stays one factor of one dim."""

    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    operands: tuple[Dims, ...] = field(default=({},))

    def push(self, index: int, placement: Sharded) -> Sharded | None:
        return through_view(placement, self.old, self.new)

    def pull(self, placement: Sharded) -> list[Sharded | None] | None:
        found = through_view(placement, self.new, self.old)
        return [found] if found else None


RuleOf = Callable[[fx.Node], Rule | None]


def same_dims(rank: int, but: Sequence[int] = ()) -> Dims:
    """The map of an operand of rank `rank` whose dims are those of the output, all `but` some."""
    return {dim: dim for dim in range(rank) if dim not in but}


def aligned(out: Sequence[int], operand: Sequence[int]) -> Dims:
    """Broadcasting: dims are matched from the last; a dim of size 1 has no entry."""
    shift = len(out) - len(operand)
    return {d + shift: d for d, size in enumerate(operand) if size == out[d + shift] and size != 1}


def pointwise(node: fx.Node) -> Rule | None:
    """The rule of an elementwise op: every operand is broadcast to the output; none for outputs that are no tensor."""
    if not is_tensor(node):
        return None
    out = shape_of(node)
    return Rule(tuple(aligned(out, shape_of(arg)) for arg in tensor_args(node)))
