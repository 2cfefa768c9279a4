"""Sums over all positions before, with decays between them, are scans.

    y[c] = sum over z <= c of exp(x[z + 1] + ... + x[c]) v[z]      ->      S[c] = exp(x[c]) S[c - 1] + v[c];  y = S

A matrix of decays is found by its use, an operand of a product that sums over z, and proved by its numbers. All that
stands between it and x is analytic (sums, differences, exp) or a constant mask, and two such functions that agree at
points drawn at random are the same function. So any spelling of the sums in the exponent will do, and the matrix, which
grows with the square of the number of chunks, is not computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.dims.contraction import Product, product_of
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import emit, op_name, shape_of, value_of
from ringopt.ir.refusal import Refusal
from ringopt.ir.symbolic_sizes import at_hand, is_open, longest, same
from ringopt.recognize.scans.at_points import AtFew, NotAlike, as_written, evaluated
from ringopt.recognize.scans.states_before import Parts, in_order_of, joined_in, put, readers, without_first
from ringopt.scans.body import to_text
from ringopt.scans.call import ScanCall
from ringopt.scans.trace import Kinds, OperandKind
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

aten = torch.ops.aten

ANALYTIC = frozenset({
    "exp", "exp2", "cumsum", "add", "sub", "rsub", "mul", "neg", "sum", "masked_fill", "where", "tril", "pad",
    "constant_pad_nd", "unsqueeze", "squeeze", "expand", "transpose", "permute", "movedim", "view", "reshape",
    "_unsafe_view", "slice", "select", "narrow", "flip", "clone", "contiguous", "alias", "to", "_to_copy",
})  # fmt: skip
MOST_ROWS = 256  # that are looked at where their number is open, or twice as many as there are at hand
LARGEST = 1 << 26  # elements of a matrix whose numbers are looked at
FARTHEST = 40  # ops between a matrix of decays and its exponents
FEWEST = 3
SCALES = (0.1, 1.0, 3.0)
SHORT = 128  # steps of which one process multiplies the matrix as fast as it takes the steps one after the other
FASTER_WRITTEN = Refusal(f"of up to {SHORT} steps, the product with its matrix of decays is as fast on one process")


@dataclass(frozen=True)
class SegmentSum:
    """A product that sums with decays. `exponents` are summed along their dim `along`; `order` has, for each of their
    other dims, the letter of the product that it is."""

    product: Product
    side: int
    source: fx.Node
    along: int
    order: tuple[str, ...]

    @property
    def node(self) -> fx.Node:
        """For the line in the program."""
        return self.product.node

    @property
    def steps(self) -> int:
        """May be open."""
        rows: int = shape_of(self.source)[self.along]
        return rows - int(self.before is not None)

    @property
    def is_short(self) -> bool:
        """Whether the number of steps is known, and so small that its square costs little."""
        return not is_open(self.steps) and self.steps <= SHORT

    @property
    def out(self) -> list[str]:
        """Letters of the state."""
        (own,) = self.product.own(self.side)
        return [letter for letter in self.product.out if letter is not None and letter != own]

    @property
    def state(self) -> list[int]:
        sizes = self.product.sizes()
        return [sizes[letter] for letter in self.out]

    @property
    def decay(self) -> list[int]:
        """The sizes of one decay beside those of the state."""
        sizes = self.product.sizes()
        return [sizes[letter] if letter in self.order else 1 for letter in self.out]

    @property
    def kinds(self) -> Kinds:
        value = value_of(self.product.node)
        shapes = (self.state, self.decay, self.state)
        return tuple(OperandKind(tuple(map(at_hand, shape)), value.dtype, value.device.type) for shape in shapes)

    @property
    def at(self) -> int:
        """The dim of the product that goes with the steps."""
        return next(i for i, letter in enumerate(self.product.out) if letter not in self.out)

    @property
    def before(self) -> Parts | None:
        """What is summed, where readers want the states before each of its rows but the first, and that after all."""
        (summed,) = self.product.contracted
        side = 1 - self.side
        parts = joined_in(self.product.operands[side], self.product.letters[side].index(summed))
        return parts if readers(self.product.node, self.at) else None

    @property
    def text(self) -> str:
        """The body of the scan."""
        return body(before=self.before is not None)

    def rewrite(self, graph: fx.Graph) -> None:
        """Puts a scan in the place of the product."""
        node, before, read = self.product.node, self.before, readers(self.product.node, self.at)
        with graph.inserting_before(node):
            if before is None:
                added, source = self.added(graph, self.product.operands[1 - self.side]), self.source
                first = emit(graph, aten.zeros_like.default, (emit(graph, aten.select.int, (added, 0, 0), node),), node)
            else:
                one, rest = before.emit(graph)
                first = emit(graph, aten.select.int, (self.added(graph, one), 0, 0), node)
                added, source = self.added(graph, rest), without_first(graph, self.source, self.along)
            xs = [self.decays(graph, source), added]
            (last,), (states,) = ScanCall([first], xs, [], self.text).emit(graph, node)
            new = emit(graph, aten.movedim.int, (states, 0, self.at), node)
            new = in_order_of(graph, new, node)
        if before is None or read is None:
            node.replace_all_uses_with(new)
        else:
            put(read, new, last)

    def decays(self, graph: fx.Graph, source: fx.Node) -> fx.Node:
        """exp of the exponents, [steps, *decay]."""
        dims = [d for d in range(len(shape_of(source))) if d != self.along]
        there = dict(zip(self.order, dims, strict=True))
        order = [self.along, *(there[letter] for letter in self.out if letter in there)]
        node = self.product.node
        x = emit(graph, aten.exp.default, (source,), node)
        if value_of(x).dtype != value_of(node).dtype:
            x = emit(graph, aten.to.dtype, (x, value_of(node).dtype), node)
        x = emit(graph, aten.permute.default, (x, order), node)
        return emit(graph, aten.reshape.default, (x, [shape_of(source)[self.along], *self.decay]), node)

    def added(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Rows of what is summed, [steps, *state]."""
        like, letters = self.product.node, self.product.letters[1 - self.side]
        (summed,) = self.product.contracted
        order = [letters.index(letter) for letter in (summed, *self.out) if letter in letters]
        order += [d for d in range(len(letters)) if d not in order]  # of size 1
        steps = shape_of(node)[letters.index(summed)]
        if value_of(node).dtype != value_of(like).dtype:
            node = emit(graph, aten.to.dtype, (node, value_of(like).dtype), like)
        x = emit(graph, aten.permute.default, (node, order), like)
        sizes = [shape_of(node)[letters.index(letter)] if letter in letters else 1 for letter in self.out]
        x = emit(graph, aten.reshape.default, (x, [steps, *sizes]), like)
        return emit(graph, aten.expand.default, (x, [steps, *self.state]), like)


def body(before: bool) -> str:
    """state' = state * decay + added. A step gives that, or what it was `before`."""
    graph = fx.Graph()
    state, decay, added = (graph.placeholder(name) for name in ("carry", "decay", "added"))
    new = graph.call_function(aten.add.Tensor, (graph.call_function(aten.mul.Tensor, (state, decay)), added))
    graph.output((new, state if before else new))
    return to_text(fx.GraphModule(torch.nn.Module(), graph), 1, 2, 0)


def segment_sum(node: fx.Node, constants: Constants, guards: bool) -> SegmentSum | None:
    """The sum with decays that a product is: of an open number of rows where there may be `guards`."""
    product = product_of(node)
    if product is None or len(product.contracted) != 1:
        return None
    for side in (0, 1):
        own, letters, matrix = product.own(side), product.letters[side], product.operands[side]
        if len(own) != 1 or None in product.out or not value_of(matrix).is_floating_point():
            continue
        if not guards and any(map(is_open, shape_of(matrix))):
            continue
        sizes = product.sizes()
        if not same(sizes[own[0]], sizes[product.contracted[0]]) or longest(sizes[own[0]]) < FEWEST:
            continue
        c, z = letters.index(own[0]), letters.index(product.contracted[0])
        for source in sources(matrix, constants):
            found = proved(matrix, c, z, source, constants)
            if found is not None:
                along, order = found
                names = tuple(letters[d] or "" for d in order)
                if all(name in product.out for name in names):
                    return SegmentSum(product, side, source, along, names)
    return None


def sources(node: fx.Node, constants: Constants) -> Iterator[fx.Node]:
    """Single values that `node` is an analytic function of, nearest first."""
    place = {each: i for i, each in enumerate(node.graph.nodes)}
    front, raised = {node}, False
    for _ in range(FARTHEST):
        last = max(front, key=place.__getitem__)
        if len(front) == 1 and raised and value_of(last).is_floating_point():
            yield last
        varying = [arg for arg in last.all_input_nodes if arg not in constants]
        if op_name(last) not in ANALYTIC or (op_name(last) in ("mul", "where") and len(varying) > 1) or not varying:
            return
        raised = raised or op_name(last) in ("exp", "exp2")
        front = (front - {last}) | set(varying)


def proved(
    matrix: fx.Node, c: int, z: int, source: fx.Node, constants: Constants
) -> tuple[int, tuple[int, ...]] | None:
    """Whether matrix[.., c, .., z] is exp(source[z + 1] + ... + source[c]), and 0 where z > c: the dim of `source` that
    is summed along, and which dims of `matrix` its other ones are. A guard limits an open number of rows."""
    given, size = shape_of(source), shape_of(matrix)
    rest = [d for d in range(len(size)) if d not in (c, z)]
    for along, rows in enumerate(given):
        others = [d for d in range(len(given)) if d != along]
        orders = [
            order
            for order in itertools.permutations(rest, len(others))
            if all(same(size[d], given[other]) for d, other in zip(order, others, strict=True))
            and all(same(size[d], 1) for d in rest if d not in order)
        ]
        if not orders or not same(rows, size[z]):
            continue
        with unset_fake_temporarily(), torch.no_grad():
            points = looked_at(matrix, source, along, constants)
            orders = [order for order in orders if all(agrees(found, c, z, x, along, order) for x, found in points)]
        if points and orders and (not is_open(rows) or rows <= most_rows(rows)):
            return along, orders[0]
    return None


def looked_at(matrix: fx.Node, source: fx.Node, along: int, constants: Constants) -> list[tuple[Tensor, Tensor]]:
    """Values of `source`, and what `matrix` is of each. Where a size is open there are few elements beside the rows, of
    which there are the most. Nothing where that cannot be computed."""
    dim, shape, few = along - len(shape_of(source)), list(shape_of(source)), None
    try:
        if any(map(is_open, (*shape, *shape_of(matrix)))):
            few = AtFew.of(source, dim, most_rows(shape[along]))
            shape = few.few(source, dim)
        if prod(shape) * shape[along] > LARGEST:
            return []
        drawn = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        xs = [drawn * scale for scale in SCALES]
        made = [(x, evaluated([matrix], {source: x}, constants, few or as_written)) for x in xs]
    except NotAlike:
        return []
    return [(x, found[0]) for x, found in made if found is not None]


def most_rows(rows: int) -> int:
    """As many as a graph is proved for whose number of rows is open."""
    return max(MOST_ROWS, 1 << (2 * at_hand(rows) - 1).bit_length())


def agrees(found: Tensor, c: int, z: int, x: Tensor, along: int, order: Sequence[int]) -> bool:
    """Whether they are the decays that `x` makes."""
    sums = x.movedim(along, -1).cumsum(-1)
    wanted = (sums[..., :, None] - sums[..., None, :]).exp().tril()
    ones = [d for d in range(found.dim()) if d not in (*order, c, z)]
    return torch.allclose(found.permute(*ones, *order, c, z).reshape(wanted.shape), wanted, rtol=1e-9, atol=1e-12)
