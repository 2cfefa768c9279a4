"""What a linear map does along each dim of the state.

    point   a coefficient of its own for every index
    mixed   indices are summed over, or change places
    free    every index has the same map

Read off the rules by which dims are followed through operators (ringopt/dims): a dim that is lost on the way is mixed,
and so is one that comes out elsewhere. Then a map of states [point, mixed, free] is a matrix [point, mixed, mixed].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.fx as fx

from ringopt.dims.rule import Rule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import outputs_of, shape_of, tensor_args
from ringopt.ir.placement import Sharded
from ringopt.scans.body import placeholders
from ringopt.scans.linear_part import read

Axis = Literal["point", "mixed", "free"]
Labels = list[int | None]  # of each dim of a value, the dim of the state that it is


def state_axes(linear: fx.GraphModule) -> tuple[Axis, ...]:
    """Of the first input, of which the first output is made. Dims of one index are free: nothing is lost."""
    state, (out, *_others) = placeholders(linear)[0], outputs_of(linear.graph)
    sizes = shape_of(state)
    found = _Followed(state)
    for node in linear.graph.nodes:
        if any(arg in found.labels for arg in read(node)):
            found.follow(node)
    if out not in found.labels:  # nothing is left of the state
        return tuple(found.kind(dim) for dim in range(len(sizes)))
    for dim, (size, label) in enumerate(zip(sizes, found.labels[out], strict=True)):
        if size != 1 and label != dim:
            found.mixed |= {dim} if label is None else {dim, label}
    return tuple(found.kind(dim) for dim in range(len(sizes)))


class _Followed:
    def __init__(self, state: fx.Node):
        sizes = shape_of(state)
        self.labels: dict[fx.Node, Labels] = {state: [dim if size != 1 else None for dim, size in enumerate(sizes)]}
        self.point, self.mixed = set[int](), set[int]()

    def kind(self, dim: int) -> Axis:
        if dim in self.mixed:
            return "mixed"
        return "point" if dim in self.point else "free"

    def follow(self, node: fx.Node) -> None:
        rule, operands = rule_of(node), list(tensor_args(node))
        if rule is not None and len(rule.operands) != len(operands):
            rule = None
        out: Labels | None = None
        for place, operand in enumerate(operands):
            if operand not in self.labels:
                continue
            new: Labels = [None] * len(shape_of(node))
            for dim, label in enumerate(self.labels[operand]):
                if label is None:
                    continue
                found = rule.push(place, Sharded(dim, 1, shape_of(operand)[dim], 1)) if rule else None
                if found is None or found.outer * found.inner != 1:
                    self.mixed.add(label)
                else:
                    new[found.dim] = label
            out = new if out is None else self.merge(out, new)
        assert out is not None
        for dim, label in enumerate(out):
            at = Sharded(dim, 1, shape_of(node)[dim], 1)
            if label is not None and rule is not None and self.varies(rule, operands, at):
                self.point.add(label)
        self.labels[node] = out

    def varies(self, rule: Rule, operands: Sequence[fx.Node], at: Sharded) -> bool:
        """Whether an operand that is no part of the state has a number of its own for each index."""
        wanted = rule.pull(at) or [None] * len(operands)
        return any(place and x not in self.labels for x, place in zip(operands, wanted, strict=True))

    def merge(self, one: Labels, other: Labels) -> Labels:
        """Of two operands, which have to agree on where a dim is."""
        for a, b in zip(one, other, strict=True):
            if a != b:
                self.mixed |= {label for label in (a, b) if label is not None}
        return [a if a == b else None for a, b in zip(one, other, strict=True)]
