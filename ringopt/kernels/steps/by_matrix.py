"""A step of a recurrence that multiplies its state by matrices, written as a kernel in Triton: all steps are one
launch, in which the state stays in registers.

    S * a + K.mT @ (v - W @ S)   ->   s0 = tl.load(carries[0] + ...)
                                      for n in range(count):
                                          r0 = tl.load(rows[0] + ...); ...
                                          x0 = s0 * r0
                                          x1 = tl.dot(r1, s0, input_precision=PRECISION)
                                          x2 = r2 - x1
                                          x3 = tl.dot(r3, x2, input_precision=PRECISION)
                                          x4 = x0 + x3
                                          tl.store(into[0] + ..., x4); s0 = x4

In such a step each column of the state goes its own way, so a program has BLOCK columns of one matrix, and a GPU has
many programs. Where the state is multiplied from the right these are rows; where from both sides, a program has a whole
matrix. A value is written for the place that each of its dims has where it is read: none (of size 1), one of the dims
in front, or dim 0 or 1 of a tile. Views are therefore other places only. Sizes are part of the text; tiles have powers
of two. Products are summed up in float32 and rounded where the step has 16 bits. Any other step is a Refusal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch.fx as fx
from torch import Tensor

from ringopt.ir.nodes import argument, op_name, outputs_of, shape_of, value_of
from ringopt.ir.refusal import Refusal
from ringopt.kernels.score_program import FLOATS, HELPERS, NoForm, rounded
from ringopt.kernels.steps.base import OneStep, Tensors
from ringopt.kernels.steps.by_element import FILLS, PREFIX, value_text

LEAST = 16  # numbers in each dim of a product on tensor cores
BLOCK = 32  # columns that a program has
MOST = 2**14  # numbers of a tile
PRODUCTS = frozenset(("bmm", "mm"))
COPIES = frozenset(("detach", "clone", "alias", "to", "_to_copy"))
RESHAPES = frozenset(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze"))
TURNS = frozenset(("transpose", "permute", "t"))


@dataclass(frozen=True)
class Place:
    """Where the elements of a dim are: `lead` has the dims of the state in front of its matrices that the dim is; else
    it is dim `tile` of a tile, in blocks or whole."""

    lead: tuple[int, ...] = ()
    tile: int = -1
    blocked: bool = False


Places = tuple[Place | None, ...]  # of each dim; None where its size is 1
WHOLE = (Place(tile=0), Place(tile=1))


@dataclass(frozen=True)
class MatrixKernel:
    """By the text of `steps(carries, rows, consts, into, last, count, first, order, at_rows, at_consts, PRECISION)`.
    `grid`: a program for each matrix of the state, and each of its blocks."""

    program: str
    grid: tuple[int, int]

    @staticmethod
    def of(step: OneStep) -> MatrixKernel | Refusal:
        """Of a step of products, sums and what is computed element by element."""
        sentences = list[str]()
        for blocked in (1, 0, None):
            try:
                return _Writer(step, blocked).kernel()
            except NoForm as why:
                sentences.append(str(why))
        return Refusal(sentences[0])

    def run(
        self, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
    ) -> list[Tensor] | None:
        from ringopt.kernels.steps.triton_steps import run_matrices

        return run_matrices(self.program, self.grid, carried, rows, consts, into, backwards)


class _Writer:
    """`blocked`: the dim of the matrices of which a program has a block. Lines: `before` the steps, and in each."""

    def __init__(self, step: OneStep, blocked: int | None):
        self.step, self.before, self.lines = step, list[str](), list[str]()
        self.roles = dict(zip((x for x in step.graph.nodes if x.op == "placeholder"), step.inputs, strict=True))
        self.carries = [node for node, role in self.roles.items() if role == "carry"]
        if not self.carries or set(step.outputs) != {"carry"}:
            raise NoForm("it has other results than what it carries")
        self.shape = shape_of(max(self.carries, key=lambda node: prod(shape_of(node))))
        if len(self.shape) < 2 or (blocked is not None and self.shape[blocked - 2] == 1):
            raise NoForm(f"a state of {list(self.shape)} has no matrices")
        self.blocked = blocked is not None
        self.block = min(BLOCK, padded(self.shape[blocked - 2])) if blocked is not None else 1
        self.blocks = -(-self.shape[blocked - 2] // self.block) if blocked is not None else 1
        self.tiles = tuple(Place(tile=dim, blocked=dim == blocked) for dim in (0, 1))
        self.found = dict[tuple[fx.Node, Places], str]()
        self.held = dict[fx.Node, Places]()  # where a carry is: the same in all of the step

    def kernel(self) -> MatrixKernel:
        """Raises NoForm for a step that is no such."""
        lead = self.shape[:-2]
        state = next(node for node in self.carries if shape_of(node) == self.shape)
        self.read(state, self.fitting(state, (*(Place(lead=(dim,)) for dim in range(len(lead))), *self.tiles)))
        made, results = dict(zip(self.carries, outputs_of(self.step.graph), strict=True)), dict[fx.Node, str]()
        while left := [node for node in self.held if node not in results]:
            if shape_of(made[left[0]]) != shape_of(left[0]):
                raise NoForm("what it carries changes its shape")
            results[left[0]] = self.read(made[left[0]], self.held[left[0]])
        if len(results) < len(self.carries):
            raise NoForm("it carries something that the rest does not read")
        head = ["batch = tl.program_id(0).to(tl.int64)", "rest = batch"]
        for dim, size in reversed([*enumerate(lead)]):
            head += [f"i{dim} = rest % {size}", f"rest = rest // {size}"] if size != 1 else []
        if self.blocked:
            head.append(f"part = tl.program_id(1) * {self.block} + tl.arange(0, {self.block})")
        head += [*self.before, "for n in range(count):", "    t = tl.cast(first + n * order, tl.int64)"]
        stored, behind = list[str](), list[str]()
        for at, node in enumerate(self.carries):
            if self.step.keeps:  # behind the one that is given: in front of it, backwards
                stored.append(
                    self.store(f"into[{at}] + (t + (order + 1) // 2) * {prod(shape_of(node))}", node, results[node])
                )
            behind.append(self.store(f"last[{at}]", node, f"s{at}"))
        stored += [f"ns{at} = {results[node]}" for at, node in enumerate(self.carries)]
        stored += [f"s{at} = ns{at}" for at in range(len(self.carries))]
        body = [*head, *(f"    {line}" for line in (*self.lines, *stored)), *behind]
        return MatrixKernel(SIGNATURE + "".join(f"    {line}\n" for line in body), (prod(lead), self.blocks))

    # ---- values ------------------------------------------------------------------------------------------------------
    def read(self, node: fx.Node, places: Places) -> str:
        """The name of a value whose dims are at these places."""
        if (node, places) not in self.found:
            if prod(self.tile_of(node, places)) > MOST:
                raise NoForm(f"{node} of {list(shape_of(node))} is too large for one tile")
            write = self.input if node.op == "placeholder" else self.call
            self.found[node, places] = write(node, places)
        return self.found[node, places]

    def input(self, node: fx.Node, places: Places) -> str:
        role, dtype = self.roles[node], value_of(node).dtype
        number = [each for each, its in self.roles.items() if its == role].index(node)
        name = f"{PREFIX[role]}{number}"
        if role == "carry":
            if node in self.held:
                return self.turned(node, places, name)
            if not any(place and not place.lead for place in places):
                raise NoForm(f"{node} has one number in each matrix")
            self.held[node] = places
            steps: list[str] = [str(prod(shape_of(node)[dim + 1 :])) for dim in range(len(places))]
            place = self.place(node, places, steps)
        else:
            name += f"_{len(self.found)}"
            first = 1 if role == "row" else 0
            steps = [f"at_{role}s[{number}][{dim + first}]" for dim in range(len(places))]
            place = " + ".join([*([f"t * at_rows[{number}][0]"] if first else []), self.place(node, places, steps)])
        mask = self.mask(node, places)
        given = {"carry": "carries", "row": "rows", "const": "consts"}[role]
        value = f"tl.load({given}[{number}] + ({place}){mask}{', other=0' if mask else ''})"
        (self.lines if role == "row" else self.before).append(f"{name} = {rounded(value, dtype)}")
        return name

    def turned(self, node: fx.Node, places: Places, name: str) -> str:
        """A carry that is read by rows and by columns."""
        other = tuple(place if place is None or place.lead else replace(place, tile=1 - place.tile) for place in places)
        if other != self.held[node] or any(place and place.blocked for place in (*places, *other)):
            raise NoForm(f"it reads all of {node}, of which a program has a part")
        made = f"x{len(self.found)}"
        self.lines.append(f"{made} = tl.trans({name})")
        return made

    def call(self, node: fx.Node, places: Places) -> str:
        name, operands = op_name(node), node.all_input_nodes
        if name in COPIES:
            value = self.read(operands[0], places)
        elif name in RESHAPES:
            return self.read(operands[0], self.before_reshape(node, places))
        elif name in TURNS:
            return self.read(operands[0], before_permutation(node, places))
        elif name == "expand":
            inner, tile = self.fitting(operands[0], places), list(self.tile_of(node, places))
            value = self.read(operands[0], inner)
            if list(self.tile_of(operands[0], inner)) == tile:
                return value
            value = f"tl.broadcast_to({value}, {tile})"
        elif name in FILLS:
            value = f"tl.full({list(self.tile_of(node, places))}, {FILLS[name]}, tl.float32)"
        elif name in PRODUCTS:
            value = self.product(node, places)
        elif name == "sum":
            value = self.sum(node, places)
        else:
            value = value_text(node, lambda operand: self.read(operand, self.fitting(operand, places)))
        made = f"x{len(self.found)}"
        self.lines.append(f"{made} = {rounded(value, value_of(node).dtype)}")
        return made

    def product(self, node: fx.Node, places: Places) -> str:
        left, right = node.args[:2]
        *lead, row, column = places
        inner = shape_of(right)[-2]
        in_tile = [place for place in (row, column) if place and not place.lead]
        if len(in_tile) < 2 or inner == 1:  # a sum, or no sum at all
            free = 1 if in_tile and in_tile[0].tile == 0 else 0
            between = WHOLE[free] if inner > 1 else None
            one, other = self.read(left, (*lead, row, between)), self.read(right, (*lead, between, column))
            return self.summed(f"{one} * {other}", free, inner) if inner > 1 else f"{one} * {other}"
        first, second = (place.tile for place in in_tile)
        given = [(left, (*lead, row, WHOLE[1 - first])), (right, (*lead, WHOLE[1 - second], column))]
        (one, at_one), (other, at_other) = given if first == 0 else reversed(given)
        parts = [self.zeroed(one, at_one, 1, inner), self.zeroed(other, at_other, 0, inner)]
        narrow = FLOATS[value_of(node).dtype]
        parts = [f"tl.cast({part}, {narrow})" if narrow else part for part in parts]
        return f"tl.dot({parts[0]}, {parts[1]}, input_precision=PRECISION)"

    def zeroed(self, node: fx.Node, places: Places, tile: int, size: int) -> str:
        """A factor of a product, 0 behind the end of the dim that is summed over."""
        name = self.read(node, places)
        loaded = name.startswith((PREFIX["row"], PREFIX["const"]))
        return name if loaded or size == padded(size) else f"tl.where({within(tile, size)}, {name}, 0.0)"

    def sum(self, node: fx.Node, places: Places) -> str:
        operand, keep = node.args[0], bool(argument(node, 2, "keepdim", False))
        dims = argument(node, 1, "dim") or []
        rank = len(shape_of(operand))
        used = [place.tile for place in places if place]
        if len(dims) != 1 or len(free := [dim for dim in (0, 1) if dim not in used]) == 0:
            raise NoForm("a sum over several dims has no form for a tile")
        dim, size = dims[0] % rank, shape_of(operand)[dims[0]]
        kept = [place for at, place in enumerate(places) if not (keep and at == dim)]
        inner = (*kept[:dim], WHOLE[free[0]] if size > 1 else None, *kept[dim:])
        name = self.read(operand, inner)
        return self.summed(name, free[0], size) if size > 1 else name

    @staticmethod
    def summed(value: str, tile: int, size: int) -> str:
        value = value if size == padded(size) else f"tl.where({within(tile, size)}, {value}, 0.0)"
        return f"tl.expand_dims(tl.sum({value}, {tile}), {tile})"

    # ---- places ------------------------------------------------------------------------------------------------------
    @staticmethod
    def fitting(node: fx.Node, places: Places) -> Places:
        """Of an operand whose dims are the last ones, or have the size 1."""
        last = places[len(places) - len(shape_of(node)) :]
        return tuple(place if size != 1 else None for size, place in zip(shape_of(node), last, strict=True))

    def before_reshape(self, node: fx.Node, places: Places) -> Places:
        """Dims of size 1 come and go, and those in front of the matrices are one dim or several."""
        old, new = shape_of(node.args[0]), shape_of(node)
        left = [(size, place) for size, place in zip(new, places, strict=True) if size != 1]
        split = list[tuple[int, Place | None]]()
        for size, place in left:
            lead = place.lead if place else ()
            split += [(self.shape[dim], Place(lead=(dim,))) for dim in lead] if len(lead) > 1 else [(size, place)]
        sizes = [size for size in old if size != 1]
        if [size for size, _ in split] != sizes:
            together = tuple(dim for dim, size in enumerate(self.shape[:-2]) if size != 1)
            front = [Place(lead=(dim,)) for dim in together]
            if [place for _, place in split[: len(front)]] != front:
                raise NoForm(f"{op_name(node)} of {list(old)} to {list(new)} moves elements between matrices")
            split = [(prod(self.shape[:-2]), Place(lead=together)), *split[len(front) :]]
        if [size for size, _ in split] != sizes:
            raise NoForm(f"{op_name(node)} of {list(old)} to {list(new)} moves elements between matrices")
        given = iter(split)
        return tuple(next(given)[1] if size != 1 else None for size in old)

    def tile_of(self, node: fx.Node, places: Places) -> tuple[int, int]:
        sizes = {0: 1, 1: 1}
        for size, place in zip(shape_of(node), places, strict=True):
            if place and not place.lead:
                if place.blocked and size != self.shape[place.tile - 2]:
                    raise NoForm(f"{node} of {list(shape_of(node))} has other columns than the state")
                sizes[place.tile] = self.block if place.blocked else padded(size)
        return sizes[0], sizes[1]

    @staticmethod
    def place(node: fx.Node, places: Places, steps: list[str]) -> str:
        """Of the elements of a tile, in memory."""
        parts = list[str]()
        for size, place, step in zip(shape_of(node), places, steps, strict=True):
            if place and not place.lead:
                parts.append(times(along(place.tile, size, place.blocked), step))
            elif place:
                parts.append(times(f"i{place.lead[0]}" if len(place.lead) == 1 else "batch", step))
        return " + ".join(parts) or "0"

    @staticmethod
    def mask(node: fx.Node, places: Places) -> str:
        """What of a tile is there."""
        parts = [
            within(place.tile, size, place.blocked)
            for size, place in zip(shape_of(node), places, strict=True)
            if place and not place.lead and (place.blocked or size != padded(size))
        ]
        return f", mask={' & '.join(parts)}" if parts else ""

    def store(self, start: str, node: fx.Node, value: str) -> str:
        places = self.held[node]
        steps = [str(prod(shape_of(node)[dim + 1 :])) for dim in range(len(places))]
        return f"tl.store({start} + ({self.place(node, places, steps)}), {value}{self.mask(node, places)})"


def before_permutation(node: fx.Node, places: Places) -> Places:
    """Where the dims were."""
    rank = len(places)
    order = list(range(rank))
    if op_name(node) == "permute":
        order = [dim % rank for dim in node.args[1]]
    elif op_name(node) == "transpose":
        one, other = (dim % rank for dim in node.args[1:3])
        order[one], order[other] = other, one
    else:
        order.reverse()  # t, of at most two dims
    return tuple(places[order.index(dim)] for dim in range(rank))


def padded(size: int) -> int:
    """Of a tile with that many numbers in a dim."""
    return max(LEAST, 1 << (size - 1).bit_length()) if size > 1 else 1


def times(number: str, step: str) -> str:
    """Their product, in few words."""
    return number if step == "1" else f"{number} * {step}"


def along(tile: int, size: int, blocked: bool = False) -> str:
    """The numbers of a dim of that size."""
    return f"{'part' if blocked else f'tl.arange(0, {padded(size)})'}{('[:, None]', '[None, :]')[tile]}"


def within(tile: int, size: int, blocked: bool = False) -> str:
    """What is in front of the end of a dim."""
    return f"({along(tile, size, blocked)} < {size})"


SIGNATURE = (
    HELPERS
    + """@triton.jit
def steps(
    carries, rows, consts, into, last, count, first, order, at_rows, at_consts, PRECISION: tl.constexpr
):
"""
)
