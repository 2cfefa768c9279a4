"""Recurrences that are computed as a tree are scans: log(n) rounds over halves of the rows, or over rows 2^k apart.

    b[:, k:] += a[:, k:] * b[:, :-k];  a[:, k:] *= a[:, :-k]   for k = 1, 2, 4, ...      (Hillis, Steele 1986)
    combine even with odd rows, scan the half, fill in the others                        (jax.lax.associative_scan, S5)
        ->
    h[t] = a[t] h[t - 1] + b[t]

So torch.export writes torch's associative_scan too. A tree is found by its first product, rows of a with rows of b, and
proved by its numbers: between a, b and h stand sums, products and picked rows only, and two such polynomials that agree
at points drawn at random are the same. Where the number of rows is open, the program's own condition (k < n) limits it
for as many rounds, and the longest is looked at (at_points.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.op_families import COPIES, PADS, PERMUTATIONS, RESHAPES, SLICES
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import eliminate_dead_code, emit, is_tensor, named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import at_hand, is_open, longest, same
from ringopt.recognize.scans.at_points import AtFew, NotAlike, evaluated
from ringopt.recognize.scans.emit import as_pairs, as_whole, laid_out
from ringopt.recognize.scans.segment_sums import body
from ringopt.scans.call import ScanCall
from ringopt.scans.real_parts import in_real_numbers
from ringopt.scans.trace import Kinds, OperandKind
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

aten = torch.ops.aten

JOINS = ("cat", "stack", "select_scatter", "slice_scatter", *PADS)
POLYNOMIAL = frozenset({
    "add", "sub", "mul", "neg", "flip", "select", "unsqueeze", "expand", "zeros_like", "ones_like", *JOINS, *COPIES,
    *PERMUTATIONS, *RESHAPES, *SLICES,
})  # fmt: skip
SMALL = 1 << 20  # numbers of h that are all looked at
FEWEST = 4  # rows


@dataclass(frozen=True)
class ParallelScan:
    """`states` are the values that have h of all rows along `dim`, which is counted from the last."""

    decay: fx.Node
    added: fx.Node
    dim: int
    states: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """For the line in the program."""
        return self.states[0]

    @property
    def steps(self) -> int:
        """May be open."""
        rows: int = shape_of(self.added)[self.dim]
        return rows

    @property
    def _real(self) -> tuple[str, Kinds]:
        state, decay = ([size for at, size in enumerate(shape_of(x)) if at != len(shape_of(x)) + self.dim]
                        for x in (self.added, self.decay))  # fmt: skip
        both = (state, self.added), (decay, self.decay), (state, self.added)
        kinds = (
            OperandKind(tuple(map(at_hand, shape)), value_of(x).dtype, value_of(x).device.type) for shape, x in both
        )
        return in_real_numbers(body(before=False), tuple(kinds))

    @property
    def kinds(self) -> Kinds:
        return self._real[1]

    @property
    def text(self) -> str:
        """The body of the scan."""
        return self._real[0]

    def rewrite(self, graph: fx.Graph) -> None:
        """Puts a scan in the place of the tree."""
        like = self.node
        with graph.inserting_before(like):
            decay, added = (
                as_pairs(graph, emit(graph, aten.movedim.int, (x, self.dim, 0), like)) for x in (self.decay, self.added)
            )
            none, first = (
                emit(graph, aten.zeros_like.default, (emit(graph, aten.select.int, (x, 0, 0), like),), like)
                for x in (decay, added)
            )
            # Nothing comes before the first row, whatever its decay: one may be infinite.
            decay = emit(graph, aten.select_scatter.default, (decay, none, 0, 0), like)
            _, (states,) = ScanCall([first], [decay, added], [], self.text).emit(graph, like)
            new = emit(graph, aten.movedim.int, (as_whole(graph, states, self.added), 0, self.dim), like)
            for old in self.states:
                old.replace_all_uses_with(laid_out(graph, new, old))
        eliminate_dead_code(graph)


def parallel_scan(node: fx.Node, constants: Constants) -> ParallelScan | None:
    """The tree that `node` is added in."""
    for decay, dim in factors(node).items():
        rows = longest(shape_of(node)[dim])
        if rows < FEWEST:
            continue
        found = made_of(decay, node, constants)
        if sum(op_name(each) in JOINS for each in found) < (rows - 1).bit_length():
            continue
        wanted = [x for x in found if has_shape_of(x, node) and value_of(x).dtype == value_of(node).dtype]
        if wanted and (states := proved(decay, node, dim, wanted, constants)):
            return ParallelScan(decay, node, dim, states)
    return None


def factors(node: fx.Node) -> dict[fx.Node, int]:
    """Other values whose rows are multiplied with rows of `node`, and along which dim, counted from the last."""
    found = dict[fx.Node, int]()
    for part, dim in moved(node) if is_tensor(node) and has_fractions(node) else ():
        for product, operand in readers(part):
            for other in product.all_input_nodes if op_name(product) == "mul" else ():
                decay = original(other.args[0] if op_name(other) in SLICES else other)
                if decay is not node and other is not operand and spread(decay, node, dim):
                    found.setdefault(decay, dim)
    return found


def readers(part: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a value or a copy of it, and the one that it reads."""
    for user in part.users:
        if op_name(user) in COPIES:
            yield from readers(user)
        yield user, part


def original(node: fx.Node) -> fx.Node:
    """What a copy is of."""
    while op_name(node) in COPIES:
        node = node.args[0]
    return node


def moved(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """Values that have rows of `node` in other places, and along which dim."""
    for part in node.users:
        if op_name(part) in SLICES:
            yield part, sliced_dim(part)
            yield from ((join, sliced_dim(part)) for join in part.users if op_name(join) in ("cat", *PADS))
        elif op_name(part) in PADS:
            yield from ((rows, sliced_dim(rows)) for rows in part.users if op_name(rows) in SLICES)
            padded = [-1 - at // 2 for at, amount in enumerate(named(part, "pad")) if not same(amount, 0)]
            if len(set(padded)) == 1 and has_shape_of(part, node):
                yield part, padded[0]


def has_fractions(node: fx.Node) -> bool:
    """Real or complex."""
    return bool(value_of(node).is_floating_point() or value_of(node).is_complex())


def has_shape_of(x: fx.Node, node: fx.Node) -> bool:
    """Whether two values have provably the same sizes."""
    shape, wanted = shape_of(x), shape_of(node)
    return len(shape) == len(wanted) and all(map(same, shape, wanted))


def sliced_dim(part: fx.Node) -> int:
    """Of a slice, counted from the last."""
    return int(named(part, "dim") % len(shape_of(part)) - len(shape_of(part)))


def spread(decay: fx.Node, node: fx.Node, dim: int) -> bool:
    """Whether a decay has all rows of `node` along `dim`, and one number or as many as a state elsewhere."""
    shape, to = shape_of(decay), shape_of(node)
    rows = -dim <= len(shape) <= len(to) and same(shape[dim], to[dim])
    return rows and all(same(size, 1) or same(size, whole) for size, whole in zip(shape[::-1], to[::-1], strict=False))


def made_of(decay: fx.Node, added: fx.Node, constants: Constants) -> list[fx.Node]:
    """What is a polynomial of these two alone, in order."""
    found, left = {decay, added}, [decay, added]
    while left:
        for node in left.pop().users:
            known = node not in found and op_name(node) in POLYNOMIAL and is_tensor(node)
            if known and all(arg in found or arg in constants for arg in node.all_input_nodes):
                found.add(node)
                left.append(node)
    return sorted(found - {decay, added})


def proved(
    decay: fx.Node, added: fx.Node, dim: int, nodes: list[fx.Node], constants: Constants
) -> tuple[fx.Node, ...]:
    """Those of `nodes` that are h: at two of the elements beside the rows, or at all, where a tensor is small. What is
    multiplied over all rows stays about 1, so that no row is lost in noise."""
    dice = torch.Generator().manual_seed(0)
    shapes = [shape_of(x) for x in (decay, added)]
    whole = not any(is_open(size) for shape in shapes for size in shape) and prod(shapes[1]) <= SMALL
    with unset_fake_temporarily(), torch.no_grad():
        for some in (True, False) if whole else (True,):
            try:
                at = AtFew.of(added, dim)
                sizes = [at.few(x, dim) for x in (decay, added)] if some else shapes
                a, b = (torch.randn(size, dtype=_wide(x), generator=dice)
                        for size, x in zip(sizes, (decay, added), strict=True))  # fmt: skip
                a = a.sgn() * ((a.abs() - 1) / a.shape[dim] ** 0.5).exp()
                found = evaluated(nodes, {decay: a, added: b}, constants, *([at] if some else []))
            except (NotAlike, RuntimeError):  # of sizes that do not fit: a constant has all elements
                continue
            h = in_order(a, b, dim)
            return tuple(node for node, x in zip(nodes, found or (), strict=False) if torch.allclose(x, h, 1e-9, 1e-9))
    return ()


def in_order(a: Tensor, b: Tensor, dim: int) -> Tensor:
    """The recurrence, row by row."""
    states: list[Tensor] = []
    for decay, row in zip(a.unbind(dim), b.unbind(dim), strict=True):
        states.append(row + decay * states[-1] if states else row)
    return torch.stack(states, b.dim() + dim)


def _wide(node: fx.Node) -> torch.dtype:
    return torch.complex128 if value_of(node).is_complex() else torch.float64
