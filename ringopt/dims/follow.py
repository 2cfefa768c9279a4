"""Follows the axes of one tensor down the graph: which dims of later values they are.

    scores [B * H, S, T]        bh s t
    .view(B, H, S, T)           b h s t      bh became (b, h)
    .softmax(-1).transpose(1, 2)    b s h t

An axis is cut into parts where a view cuts it, also in the values before. Only what a value holds element by element is
followed: views, pointwise ops, softmax, dropout. This is how a candidate for attention is found; that it is one is
proved by reading its elements (ringopt/recognize/lift.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch.fx as fx

from ringopt.dims.op_families import PADS, SLICES, SOFTMAXES
from ringopt.dims.rule import ViewRule
from ringopt.dims.rules import rule_of
from ringopt.ir.nodes import argument, is_aten, is_tensor, op_name, shape_of, tensor_args

Dims = tuple[tuple[str, ...], ...]

# The dim they work along keeps its meaning; its size may change (sinks are put beside the keys, and cut off again).
ALONG = frozenset((*SOFTMAXES, "dropout", "cat", *SLICES, *PADS))


class Axes:
    """Names of axes and their sizes; a name may have been cut into others."""

    def __init__(self, sizes: dict[str, int]):
        self.sizes = dict(sizes)
        self.parts: dict[str, tuple[str, str]] = {}

    def whole(self, names: Sequence[str]) -> tuple[str, ...]:
        """The uncut parts of `names`, outermost first; those of size 1 count for nothing."""
        found: list[str] = []
        for name in names:
            found += self.whole(self.parts[name]) if name in self.parts else [name] * bool(self.sizes[name] != 1)
        return tuple(found)

    def size(self, names: Sequence[str]) -> int:
        return prod(self.sizes[name] for name in self.whole(names))

    def cut(self, name: str, outer: int) -> tuple[str, str]:
        first, second = f"{name}0", f"{name}1"
        self.sizes[first], self.sizes[second] = outer, self.sizes[name] // outer
        self.parts[name] = (first, second)
        return first, second

    def view(self, dims: Dims, shape: Sequence[int]) -> Dims | None:
        """The dims of a reshape to `shape`; None where axes would be cut unevenly."""
        queue = [name for dim in dims for name in self.whole(dim)]
        result = []
        for size in shape:
            taken: list[str] = []
            while (have := self.size(taken)) < size:
                if not queue or size % have:
                    return None
                name, missing = queue.pop(0), size // have
                if self.sizes[name] > missing:
                    if self.sizes[name] % missing:
                        return None
                    name, rest = self.cut(name, missing)
                    queue.insert(0, rest)
                taken.append(name)
            if have != size:
                return None
            result.append(tuple(taken))
        return tuple(result) if not queue else None


def follow(start: fx.Node, dims: Dims, axes: Axes) -> Iterator[tuple[fx.Node, Dims]]:
    """`start` and the values below it in order of the graph, each with its axes, as far as they can be followed."""
    found: dict[fx.Node, Dims] = {start: dims}
    pending, node = set(start.users), start
    yield start, dims
    while pending:
        node = node.next
        if node not in pending:
            continue
        pending.discard(node)
        reached = node.op == "call_function" and is_aten(node) and is_tensor(node)
        below = _dims_of(node, found, axes) if reached else None
        if below is not None:
            found[node] = below
            pending |= set(node.users)
            yield node, below


def _dims_of(node: fx.Node, known: dict[fx.Node, Dims], axes: Axes) -> Dims | None:
    operands, shape = list(tensor_args(node)), shape_of(node)
    followed = [(i, arg) for i, arg in enumerate(operands) if arg in known]
    if op_name(node) in ALONG:
        first = known[followed[0][1]]
        if any(known[arg] != first for _, arg in followed) or len(first) != len(shape):
            return None
        touched = along(node)
        before = shape_of(followed[0][1])
        same = all(size == old or dim in touched for dim, (size, old) in enumerate(zip(shape, before, strict=True)))
        return first if same else None
    rule = rule_of(node)
    if rule is None or rule.summed or len(rule.operands) != len(operands):
        return None
    if isinstance(rule, ViewRule):
        source = known[operands[0]]
        plain = all(size == axes.size(dim) for size, dim in zip(shape_of(operands[0]), source, strict=True))
        return axes.view(source, shape) if plain else None
    result: list[tuple[str, ...]] = [()] * len(shape)
    for i, arg in followed:
        for out, dim in rule.operands[i].items():
            if result[out] and axes.whole(result[out]) != axes.whole(known[arg][dim]):
                return None
            result[out] = known[arg][dim]
    if any(size != 1 and not names for size, names in zip(shape, result, strict=True)):
        return None  # a dim that another operand brings, or that is new
    return tuple(result)


def along(node: fx.Node) -> set[int]:
    """The dims that an op of ALONG may change the size of."""
    rank, name = len(shape_of(node)), op_name(node)
    if name in (*SOFTMAXES, "dropout"):
        return set()
    if name in PADS:
        return {rank - 1 - i // 2 for i in range(len(node.args[1]))}
    return {argument(node, 1, "dim", 0) % rank}
