"""A triangular system that is solved row by row.

    T[i, :i] = L[i, :i] + L[i, :i] @ T[:i, :i],  i = 1, 2, ...      ->      T = (1 - L)^-1 L

In chunked delta rules (Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024, section 3.2) this is
the inverse within a chunk. The rows are found as a chain of writes to one square matrix. What stands between the
chain's end and what it is made of only adds, multiplies, sums and takes parts: a polynomial, and two polynomials that
agree at points drawn at random are the same. So any spelling of a row will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.op_families import CASTS, COPIES, MATRIX_PRODUCTS, PERMUTATIONS, RESHAPES, SLICES
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import argument, emit, is_tensor, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.recognize.scans.at_points import evaluated
from ringopt.recognize.scans.emit import laid_out
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

aten = torch.ops.aten

WRITES = ("select_scatter", "slice_scatter")
PARTS = ("select", *SLICES, *WRITES)
POLYNOMIAL = frozenset({
    *PARTS, *COPIES, *CASTS, *MATRIX_PRODUCTS, *PERMUTATIONS, *RESHAPES, "add", "sub", "rsub", "neg", "mul", "sum",
    "unsqueeze", "expand", "einsum", "mv", "tril", "triu", "masked_fill", "where",
})  # fmt: skip
FEWEST = 3  # rows that are a system
FARTHEST = 8  # values before the first write that are looked at
NARROW = (torch.float16, torch.bfloat16)  # in which nothing is solved
Sizes = Sequence[Any]


@dataclass(frozen=True)
class System:
    """(1 - sign L)^-1 (scale L), L the part of a matrix below its diagonal; with the rest of it, where it `keeps`
    that."""

    sign: int
    scale: int
    keeps: bool

    def of(self, x: Tensor) -> Tensor:
        """For a matrix in numbers."""
        below, how = x.tril(-1), {"upper": False, "unitriangular": True}
        solved: Tensor = torch.linalg.solve_triangular(-self.sign * below, self.scale * below, **how)
        return solved + x.triu() * self.keeps

    def is_of(self, solved: Tensor, x: Tensor) -> bool:
        """Whether `solved` is that, but for rounding."""
        return solved.shape == x.shape and torch.allclose(solved, self.of(x), rtol=1e-9, atol=1e-10)


SYSTEMS = [System(sign, scale, keeps) for sign in (1, -1) for scale in (1, -1) for keeps in (False, True)]


@dataclass(frozen=True)
class Substitution:
    """`result` is `system` of `source`."""

    result: fx.Node
    source: fx.Node
    system: System

    def rewrite(self, graph: fx.Graph) -> None:
        """Puts a solve in the place of the writes."""
        like, system, dtype = self.result, self.system, value_of(self.result).dtype
        narrow, how = dtype in NARROW, {"upper": False, "unitriangular": True}
        with graph.inserting_before(like):
            below = emit(graph, aten.tril.default, (self.source, -1), like)
            if narrow:
                below = emit(graph, aten.to.dtype, (below, torch.float32), like)
            minus = emit(graph, aten.neg.default, (below,), like)
            left, right = (minus if system.sign > 0 else below), (below if system.scale > 0 else minus)
            new = emit(graph, aten.linalg_solve_triangular.default, (left, right), like, how)
            if narrow:
                new = emit(graph, aten.to.dtype, (new, dtype), like)
            if system.keeps:
                rest = emit(graph, aten.triu.default, (self.source,), like)
                new = emit(graph, aten.add.Tensor, (new, rest), like)
            new = laid_out(graph, new, like)
        like.replace_all_uses_with(new)


def substitution(node: fx.Node, constants: Constants) -> Substitution | None:
    """The solve that `node` ends, the last write to a square matrix."""
    shape = shape_of(node) if writes_part(node) else ()
    rows = shape[-1] if len(shape) > 1 else 0
    if is_open(rows) or rows < FEWEST or not same(shape[-2], rows) or not value_of(node).is_floating_point():
        return None
    if any(user.args[0] is node and writes_to(user, shape) for user in node.users):
        return None
    found = [each for each in sources(node, rows, constants) if is_square(each, shape)]
    values = at_a_point(node, found, constants) if found else None
    if values is None:
        return None
    solved = values.pop()
    pairs = ((source, x, system) for source, x in zip(found, values, strict=True) for system in SYSTEMS)
    return next((Substitution(node, source, system) for source, x, system in pairs if system.is_of(solved, x)), None)


def is_square(node: fx.Node, shape: Sizes) -> bool:
    """Whether a value has the shape of the matrix, its last sizes in numbers."""
    return alike(shape_of(node), shape) and not any(map(is_open, shape_of(node)[-2:]))


def writes_part(node: fx.Node) -> bool:
    """Whether a part of a tensor is replaced."""
    return op_name(node) in WRITES


def writes_to(node: fx.Node, shape: Sizes) -> bool:
    """Whether a part of a tensor of this shape is replaced."""
    return writes_part(node) and alike(shape_of(node), shape)


def alike(one: Sizes, other: Sizes) -> bool:
    """Whether two shapes are the same."""
    return len(one) == len(other) and all(map(same, one, other))


def sources(node: fx.Node, rows: int, constants: Constants) -> Iterator[fx.Node]:
    """The single values that `node` is a polynomial of, behind as many writes as there are rows to solve, the nearest
    first."""
    place = {each: i for i, each in enumerate(node.graph.nodes)}
    front, writes, found = {node}, 0, 0
    while front and found < FARTHEST:
        last = max(front, key=place.__getitem__)
        if len(front) == 1 and writes >= rows - 1 and not writes_to(last, shape_of(node)):
            found += 1
            yield last
        varying = [arg for arg in last.all_input_nodes if arg not in constants and is_tensor(arg)]
        masks = op_name(last) in ("masked_fill", "where") and len(varying) > 1
        if op_name(last) not in POLYNOMIAL or masks or not of_matrices(last, len(shape_of(node)) - 2):
            return
        writes += writes_to(last, shape_of(node))
        front = (front - {last}) | set(varying)


def of_matrices(node: fx.Node, batch: int) -> bool:
    """Whether what takes or writes a part takes that of each matrix: of none of the first `batch` dims."""
    if op_name(node) not in PARTS:
        return True
    dim = argument(node, 2 if writes_part(node) else 1, "dim", 0)
    return bool(dim % len(shape_of(node.args[0])) >= batch)


def at_a_point(node: fx.Node, found: Sequence[fx.Node], constants: Constants) -> list[Tensor] | None:
    """The values of `found`, and then of `node`, where the last of those is drawn at random; None where that cannot be
    computed. Of each dim of the batch there are two: nothing takes parts of it, so how many makes no difference."""
    *batch, rows, _ = shape_of(found[-1])
    few = [2] * len(batch)

    def resized(each: Any) -> Any:
        if not isinstance(each, (list, tuple)) or not batch:
            return each
        sizes = [value_of(size) if isinstance(size, fx.Node) else size for size in each[: len(batch)]]
        numbers = all(isinstance(size, (int, torch.SymInt)) for size in sizes)
        return [*few, *each[len(batch) :]] if numbers and alike(sizes, batch) else each

    def arguments(each: fx.Node, _: Any) -> tuple[Any, Any]:
        return tuple(map(resized, each.args)), {key: resized(value) for key, value in each.kwargs.items()}

    with unset_fake_temporarily(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(*few, rows, rows, dtype=torch.float64, generator=generator) / rows**0.5
        try:
            return evaluated([*found, node], {found[-1]: x}, constants, arguments)
        except (RuntimeError, IndexError, TypeError):  # an op that goes by the size of the batch
            return None
