"""Contractions of two tensors, however they are spelled: matmul, bmm, mm, linear, einsum, tensordot, inner, multiply
and sum.

    matmul(q [B, H, S, D], k [B, 1, D, T])      left b h s d, right b . d t, out b h s t

Every dim has a letter; a letter of both operands that the output lacks is contracted. A dim of size 1 that is broadcast
has none.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ringopt.dims.op_families import MATRIX_PRODUCTS
from ringopt.ir.nodes import argument, is_aten, is_tensor, op_name, shape_of

Letters = tuple["str | None", ...]


@dataclass(frozen=True)
class Product:
    """`out` has a letter for every dim of `node`; `left` and `right` for those of the operands."""

    node: fx.Node
    operands: tuple[fx.Node, fx.Node]
    letters: tuple[Letters, Letters]
    out: Letters

    @property
    def contracted(self) -> tuple[str, ...]:
        left, right = self.letters
        return tuple(letter for letter in left if letter and letter in right and letter not in self.out)

    def own(self, side: int) -> tuple[str, ...]:
        """Letters of the output that only this operand has."""
        mine, other = self.letters[side], self.letters[1 - side]
        return tuple(letter for letter in mine if letter and letter in self.out and letter not in other)

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for operand, letters in zip((*self.operands, self.node), (*self.letters, self.out), strict=True):
            for size, letter in zip(shape_of(operand), letters, strict=True):
                if letter:
                    found[letter] = max(found.get(letter, 1), size)
        return found


def product_of(node: fx.Node) -> Product | None:
    """The contraction that `node` is, or None. Every letter of it is in the output, or in both operands."""
    if not is_aten(node) or not is_tensor(node):
        return None
    maker = MAKERS.get(op_name(node))
    found = maker(node) if maker is not None else None
    if found is None:
        return None
    left, right = found.letters
    alone = (set(left) ^ set(right)) - set(found.out) - {None}
    return None if alone else found


# ---- one maker an op -------------------------------------------------------------------------------------------------
def matmul(node: fx.Node) -> Product | None:
    """matmul, bmm, mm of two matrices or batches of them; none where an operand is a vector."""
    left, right = node.args[:2]
    if len(shape_of(left)) < 2 or len(shape_of(right)) < 2:
        return None
    return by_letters(node, (left, right), ("id", "dj"), "ij")


def linear(node: fx.Node) -> Product | None:
    """x [..., d] by a weight [j, d]; none with a bias, whose addition is no part of the contraction."""
    if len(node.args) > 2 and node.args[2] is not None:
        return None
    rank = len(shape_of(node))
    if rank < 2 or len(shape_of(node.args[1])) != 2:
        return None
    rows = string.ascii_uppercase[: rank - 1]
    return Product(node, (node.args[0], node.args[1]), ((*rows, "d"), ("j", "d")), (*rows, "j"))


def by_letters(node: fx.Node, operands: tuple[fx.Node, fx.Node], ends: tuple[str, str], out: str) -> Product:
    """A product of the last dims; those before are matched from the right, a size of 1 is broadcast."""
    rank = len(shape_of(node)) - len(out)
    batch = string.ascii_uppercase[:rank]
    letters = []
    for operand, end in zip(operands, ends, strict=True):
        sizes = shape_of(operand)[: -len(end)]
        whole = shape_of(node)[rank - len(sizes) : rank]
        own = batch[rank - len(sizes) :]
        letters.append((*_broadcast(own, sizes, whole), *end))
    return Product(node, operands, (letters[0], letters[1]), (*batch, *out))


def tensordot(node: fx.Node) -> Product | None:
    """Dims of the first operand with dims of the second; what is left of both stands one after the other."""
    left, right, firsts, seconds = node.args[:4]
    pairs = {j % len(shape_of(right)): i % len(shape_of(left)) for i, j in zip(firsts, seconds, strict=True)}
    if any(shape_of(left)[i] != shape_of(right)[j] for j, i in pairs.items()):
        return None  # one number, summed with many
    names = iter(string.ascii_letters)
    of_left = [next(names) for _ in shape_of(left)]
    of_right = [of_left[pairs[j]] if j in pairs else next(names) for j in range(len(shape_of(right)))]
    out = [letter for letter in (*of_left, *of_right) if (letter in of_left) != (letter in of_right)]
    return Product(node, (left, right), (tuple(of_left), tuple(of_right)), tuple(out))


def inner(node: fx.Node) -> Product | None:
    """Rows with rows."""
    left, right = node.args[:2]
    ranks = len(shape_of(left)), len(shape_of(right))
    if 0 in ranks or ranks == (1, 1):
        return None
    of_left = string.ascii_uppercase[: ranks[0] - 1]
    of_right = string.ascii_lowercase[: ranks[1] - 1]
    return Product(node, (left, right), ((*of_left, "z"), (*of_right, "z")), (*of_left, *of_right))


def _broadcast(letters: Sequence[str], sizes: Sequence[int], whole: Sequence[int]) -> Letters:
    return tuple(letter if size == full else None for letter, size, full in zip(letters, sizes, whole, strict=True))


def einsum(node: fx.Node) -> Product | None:
    """Of two operands, with ellipses and implicit outputs; none for diagonals ("ii")."""
    equation, operands = node.args[0].replace(" ", ""), list(node.args[1])
    if len(operands) != 2:
        return None
    inputs, arrow, out = equation.partition("->")
    out = out if arrow else implicit_output(inputs)
    spelled = inputs.split(",")
    ranks = [len(shape_of(operand)) for operand in operands]
    extra = max(rank - len(text.replace("...", "")) for rank, text in zip(ranks, spelled, strict=True))
    free = [letter for letter in string.ascii_letters if letter not in equation][: max(extra, 0)]
    letters = []
    for rank, text in zip(ranks, spelled, strict=True):
        dims = rank - len(text.replace("...", ""))
        letters.append(text.replace("...", "".join(free[len(free) - dims :])))
    out = out.replace("...", "".join(free))
    if any(len(set(each)) < len(each) for each in (*letters, out)):
        return None  # a diagonal
    sizes: dict[str, int] = {}
    for operand, each in zip(operands, letters, strict=True):
        for letter, size in zip(each, shape_of(operand), strict=True):
            sizes[letter] = max(sizes.get(letter, 1), size)
    maps = [
        tuple(letter if size == sizes[letter] else None for letter, size in zip(each, shape_of(operand), strict=True))
        for operand, each in zip(operands, letters, strict=True)
    ]
    return Product(node, (operands[0], operands[1]), (maps[0], maps[1]), tuple(out))


def implicit_output(inputs: str) -> str:
    """The output of an equation without "->": letters that come once, in their order."""
    once = [letter for letter in inputs if letter.isalpha() and inputs.count(letter) == 1]
    return "..." * ("..." in inputs) + "".join(sorted(once))


def multiply_and_sum(node: fx.Node) -> Product | None:
    """sum(a * b, dims): the product is of the operands of the multiplication."""
    times, dims = node.args[0], argument(node, 1, "dim")
    if op_name(times) != "mul" or not all(is_tensor(arg) for arg in times.args) or dims is None:
        return None
    rank = len(shape_of(times))
    gone = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    if not gone or argument(node, 2, "keepdim", False):
        return None
    names = string.ascii_letters[:rank]
    letters = []
    for operand in times.args:
        sizes = shape_of(operand)
        own = names[rank - len(sizes) :]
        letters.append(_broadcast(own, sizes, shape_of(times)[rank - len(sizes) :]))
    out = tuple(letter for dim, letter in enumerate(names) if dim not in gone)
    return Product(node, (times.args[0], times.args[1]), (letters[0], letters[1]), out)


MAKERS: dict[str, Callable[[fx.Node], Product | None]] = {
    **dict.fromkeys(MATRIX_PRODUCTS, matmul),
    "linear": linear,
    "einsum": einsum,
    "tensordot": tensordot,
    "inner": inner,
    "sum": multiply_and_sum,
}
