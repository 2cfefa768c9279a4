"""Views and selections: ops whose elements are elements of their source. For ringopt/recognize/lift.py.

A rule takes (node, index) to (source, index), or to None where it does not cover the case. It computes nothing: element
[b, h, s, d] of `x[:, :, None].expand(...).reshape(...)` is element [b, h // groups, s, d] of x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, COPIES, PERMUTATIONS, RESHAPES
from ringopt.dims.rules import rule_of
from ringopt.expr.simplify import apply, literal
from ringopt.expr.terms import Affine, Apply, Term, affine
from ringopt.ir.nodes import argument, is_tensor, shape_of, value_of
from ringopt.ir.symbolic_sizes import place_of, slice_of
from ringopt.recognize.element_reader import ElementReader

Index = tuple[Term, ...]
Place = tuple[fx.Node, Index]
View = Callable[[ElementReader, fx.Node, Index], "Place | None"]

ZERO = affine({}, 0)


def plus(left: Term, right: Term | int) -> Term:
    """The int64 sum of two coordinates."""
    return apply("add", [left, right], torch.int64)


def times(term: Term, factor: int) -> Term:
    """A coordinate times a constant, distributed over sums."""
    if term is ZERO:
        return ZERO  # whatever the factor, which may be an open size
    if isinstance(term, Apply) and term.op == "add":
        return plus(*(times(part, factor) for part in (literal(arg, torch.int64) for arg in term.args)))
    return apply("mul", [term, factor], torch.int64)


def broadcast(index: Index, operand: fx.Node) -> Index:
    """The index into an operand that is broadcast, from the right, to the shape that `index` counts in."""
    sizes = shape_of(operand)
    return tuple(ZERO if size == 1 else i for i, size in zip(index[len(index) - len(sizes) :], sizes, strict=True))


def at_dim(index: Index, dim: int, term: Term) -> Index:
    """The index with another coordinate in one dim."""
    return (*index[:dim], term, *index[dim + 1 :])


def bounds_of_slice(node: fx.Node, first: int, size: int) -> tuple[int, int, int]:
    """(first, step, how many) of a slice whose start, end, step are the arguments from `first` on."""
    start, stop = argument(node, first, "start"), argument(node, first + 1, "end")
    return slice_of(size, start, stop, argument(node, first + 2, "step", 1))


def same(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """The same element; casts to another dtype are no view."""
    source = node.args[0]
    return (source, index) if value_of(source).dtype == value_of(node).dtype else None


def reordered(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """A permutation of dims: the index is permuted back."""
    rule = rule_of(node)
    if rule is None:
        return None
    dims = {dim: out for out, dim in rule.operands[0].items()}
    return node.args[0], tuple(index[dims[dim]] for dim in range(len(index)))


def unsqueeze(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """The index without the new dim."""
    dim = node.args[1] % len(index)
    return node.args[0], index[:dim] + index[dim + 1 :]


def expand(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Index 0 in expanded dims."""
    return node.args[0], broadcast(index, node.args[0])


def select(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """The constant index inserted at the selected dim."""
    source, dim, which = node.args
    if not isinstance(which, int):
        return None
    dim %= len(index) + 1
    return source, (*index[:dim], affine({}, place_of(which, shape_of(source)[dim])), *index[dim:])


def slice_(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """start + step * i along the sliced dim."""
    source, dim = node.args[0], argument(node, 1, "dim", 0) % len(index)
    start, step, _count = bounds_of_slice(node, 2, shape_of(source)[dim])
    return source, at_dim(index, dim, plus(times(index[dim], step), start))


def reshape(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Dims are matched in groups of equal product; a group is one flat number, taken apart into the source's dims."""
    old, new = shape_of(node.args[0]), shape_of(node)
    result: list[Term] = []
    out = 0
    while len(result) < len(old):
        first = last = len(result)
        inner, size = old[first], 1
        flat: Term = ZERO
        while size != inner:
            if size < inner and out < len(new):
                flat, size = joined(plus(times(flat, new[out]), index[out])), size * new[out]
                out += 1
            elif last + 1 < len(old):
                last += 1
                inner *= old[last]
            else:
                return None  # a tensor without elements
        result += _unravel(reader, flat, old[first : last + 1])
    return node.args[0], tuple(result)


def narrow(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """start + i along `dim`; `start` an int."""
    source, dim, start = node.args[0], node.args[1] % len(index), node.args[2]
    if isinstance(start, fx.Node):
        return None
    return source, at_dim(index, dim, plus(index[dim], place_of(start, shape_of(source)[dim])))


def _unravel(reader: ElementReader, flat: Term, sizes: Sequence[int]) -> list[Term]:
    digits: list[Term] = []
    for size in reversed(sizes[1:]):
        flat, digit = divide(reader, flat, size)
        digits.insert(0, digit)
    return [flat, *digits]


def divide(reader: ElementReader, term: Term, length: int) -> tuple[Term, Term]:
    """Quotient and remainder of a coordinate. (a * length + b) // length is a + b // length, whatever b is: b is taken
    such that it is less than `length`, or else that its quotient is one of two."""
    for rows in (1, 2):
        for nearest in (False, True):
            high, low = parts(term, length, nearest)
            least, most = reader.bounds(low)
            if rows == 1 and least >= 0 and most < length:
                return high, low
            if rows == 2 and most // length - least // length == 1:
                return quotient_and_rest(reader, high, low, length)
    return quotient_and_rest(reader, *parts(term, length, False), length)


def quotient_and_rest(reader: ElementReader, high: Term, low: Term, length: int) -> tuple[Term, Term]:
    """Of high * length + low."""
    quotient = reader.fold(apply("floor_divide", [low, length], torch.int64))
    return plus(high, quotient), reader.fold(apply("remainder", [low, length], torch.int64))


def parts(term: Term, length: int, nearest: bool) -> tuple[Term, Term]:
    """(high, low) with term = high * length + low: steps below `length` go to low, and with `nearest` those just below
    a multiple as negative ones. So places that are shifted by their row, q * (length - 1) + k, are q and k - q."""
    high: Term = ZERO
    low: Term = ZERO
    for part in addends(term):
        if isinstance(part, Affine):
            split = {axis: _quotient(step, length, nearest) for axis, step in part.steps}
            high = plus(high, affine(split, part.start // length))
            rest = {axis: step - split[axis] * length for axis, step in part.steps}
            low = plus(low, affine(rest, part.start % length))
        else:
            low = plus(low, part)
    return high, low


def _quotient(step: int, length: int, nearest: bool) -> int:
    if nearest:
        return (2 * step + length) // (2 * length)
    return step // length if step % length == 0 else 0


def addends(term: Term) -> Iterable[Term]:
    """The summands of nested sums."""
    if isinstance(term, Apply) and term.op == "add" and not term.kwargs:
        for arg in term.args:
            yield from addends(arg if isinstance(arg, Term) else affine({}, arg))  # type: ignore[arg-type]
    else:
        yield term


def joined(term: Term) -> Term:
    """x // c * c + x % c is x: a view takes a coordinate apart, and a later one puts it together again."""
    terms = list(addends(term))
    for whole in terms:
        for rest in terms:
            if not (isinstance(rest, Apply) and rest.op == "remainder"):
                continue
            coordinate, length = rest.args
            if whole is apply("mul", [apply("floor_divide", [coordinate, length], torch.int64), length], torch.int64):
                others = [each for each in terms if each is not whole and each is not rest]
                return joined(reduce(plus, others, literal(coordinate, torch.int64)))
    return term


def as_strided(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Of a source that lies in memory as it is counted."""
    source, _sizes, strides = node.args[:3]
    value = value_of(source)
    if not value.is_contiguous() or value.storage_offset() or not value.dim():
        return None
    flat: Term = affine({}, argument(node, 3, "storage_offset") or 0)
    for place, stride in zip(index, strides, strict=True):
        flat = plus(flat, times(place, stride))
    least, most = reader.bounds(flat)
    inside = least >= 0 and most < value.numel()  # beyond it is memory of which nothing is known
    return (source, tuple(_unravel(reader, flat, shape_of(source)))) if inside else None


def repeat(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """i % size along each dim."""
    source = node.args[0]
    sizes = shape_of(source)
    last = index[len(index) - len(sizes) :]
    return source, tuple(divide(reader, i, size)[1] if size > 1 else ZERO for i, size in zip(last, sizes, strict=True))


def repeat_interleave(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """i // repeats along `dim`; `repeats` an int."""
    source, repeats, dim = node.args[0], node.args[1], argument(node, 2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    dim %= len(index)
    return source, at_dim(index, dim, divide(reader, index[dim], repeats)[0])


def flip(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """size - 1 - i along flipped dims."""
    dims = [dim % len(index) for dim in node.args[1]]
    sizes = shape_of(node)
    return node.args[0], tuple(plus(times(i, -1), sizes[dim] - 1) if dim in dims else i for dim, i in enumerate(index))


def index_tensor(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Climbs into the source only if no number is below 0: those would count from its end."""
    found = looked_up(reader, node, index)
    if found is None:
        return None
    source, full, looked = found
    inside = source.op in ("placeholder", "get_attr") or all(reader.bounds(term)[0] >= 0 for term in looked)
    return (source, full) if inside else None


def looked_up(reader: ElementReader, node: fx.Node, index: Index) -> tuple[fx.Node, Index, list[Term]] | None:
    """Advanced indexing: the source, where in it, and the coordinates that came out of index tensors."""
    source, indices = node.args[0], list(node.args[1])
    if any(is_tensor(i) and value_of(i).dtype in (torch.bool, torch.uint8) for i in indices):
        return None
    used = [dim for dim, i in enumerate(indices) if i is not None]
    rank = max(len(shape_of(indices[dim])) for dim in used)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    here, rest = index[first : first + rank], iter(index[:first] + index[first + rank :])
    looked = {dim: reader.at(indices[dim], broadcast(here, indices[dim])) for dim in used}
    full = tuple(looked[dim] if dim in looked else next(rest) for dim in range(len(shape_of(source))))
    return source, full, list(looked.values())


def index_select(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Along `dim` the element of the index vector."""
    source, dim, which = node.args
    dim %= len(index)
    return source, at_dim(index, dim, reader.at(which, (index[dim],) if shape_of(which) else ()))


def gather(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Along `dim` the element of the index tensor at the same place."""
    source, dim, which = node.args[:3]
    return source, at_dim(index, dim % len(index), reader.at(which, index))


def embedding(reader: ElementReader, node: fx.Node, index: Index) -> Place | None:
    """Row `ids[...]` of the weight; none with padding_idx or scale_grad_by_freq, whose gradients are not those of the
    rows that are read."""
    weight, ids = node.args[:2]
    if argument(node, 2, "padding_idx", -1) >= 0 or argument(node, 3, "scale_grad_by_freq", False):
        return None  # its gradient is not that of the rows that are read
    return weight, (reader.at(ids, index[:-1]), index[-1])


VIEWS: dict[str, View] = {
    **dict.fromkeys((*COPIES, *CASTS), same),
    **dict.fromkeys(PERMUTATIONS, reordered),
    **dict.fromkeys((*RESHAPES, "view_as"), reshape),
    **dict.fromkeys(("expand", "expand_as"), expand),
    "unsqueeze": unsqueeze,
    "select": select,
    "slice": slice_,
    "narrow": narrow,
    "as_strided": as_strided,
    "repeat": repeat,
    "repeat_interleave": repeat_interleave,
    "flip": flip,
    "index": index_tensor,
    "index_select": index_select,
    "gather": gather,
    "embedding": embedding,
}
