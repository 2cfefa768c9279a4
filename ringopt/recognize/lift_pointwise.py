"""How the element of an op's output is made from elements of its operands, one rule an op.

A rule gives a term, or None where it does not cover the case. Ops with ATen's pointwise tag share one: `pointwise`.
Ops whose elements are elements of their source are in ringopt/recognize/lift_views.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ringopt.dims.op_families import CASTS, ELEMENTWISE, PADS
from ringopt.expr.simplify import apply, cast, compare, literal, logic, where
from ringopt.expr.terms import INTEGERS, Affine, Plain, Term, affine, constant, number
from ringopt.ir.nodes import argument, is_tensor, named, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import place_of
from ringopt.recognize.element_reader import ElementReader
from ringopt.recognize.lift_views import Index, at_dim, bounds_of_slice, broadcast, looked_up, plus, times
from ringopt.torch_compat.schema import schema_of

Rule = Callable[[ElementReader, fx.Node, Index], "Term | None"]


# ---- creation and casts ----------------------------------------------------------------------------------------------
def filled(position: int | None, value: int = 0) -> Rule:
    """A tensor of one number: the argument at `position`, or `value`."""

    def rule(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
        given = value if position is None else argument(node, position, "fill_value")
        if isinstance(given, fx.Node):
            return cast(reader.at(given, ()), value_of(node).dtype) if is_tensor(given) else None
        return literal(given, value_of(node).dtype)

    return rule


def arange(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """start + step * i; integer starts and steps only."""
    numbers = [*node.args] if len(node.args) > 1 else [0, *node.args]
    start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    if type(start) is not int or type(step) is not int:
        return None
    return cast(plus(times(index[0], step), start), value_of(node).dtype)


def converted(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """The same element in another dtype."""
    return cast(reader.at(node.args[0], index), value_of(node).dtype)


def wrapped(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """Indexing by numbers that may be below 0: read from the source, which counts those from its end."""
    found = looked_up(reader, node, index)
    return reader.stored(found[0], found[1]) if found is not None else None


# ---- places ----------------------------------------------------------------------------------------------------------
def triangle(kept: str) -> Rule:
    """triu keeps where column - row >= diagonal, tril where <=."""

    def rule(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
        offset = apply("sub", [index[-1], index[-2]], torch.int64)
        inside = compare(kept, offset, argument(node, 1, "diagonal", 0))
        return where(inside, reader.at(node.args[0], index), 0, value_of(node).dtype)

    return rule


def between(reader: ElementReader, place: Term, start: int, stop: int) -> tuple[Term, Term]:
    """Whether start <= place < stop, and place - start kept inside the piece, so that it may be looked up anyway."""
    inside = logic("logical_and", reader.fold(compare("ge", place, start)), reader.fold(compare("lt", place, stop)))
    here = plus(place, -start)
    least, most = reader.bounds(here)
    if least < 0 or most >= stop - start:
        here = apply("clamp", [here, 0, stop - start - 1], torch.int64)
    return inside, here


def scattered(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """slice_scatter, select_scatter: the written tensor in its part, the base outside; steps of 1 only."""
    found = written(reader, node, index)
    if found is None:
        return None
    inside, source, place = found
    return where(inside, reader.at(source, place), reader.at(node.args[0], index), value_of(node).dtype)


def written(reader: ElementReader, node: fx.Node, index: Index) -> tuple[Term, fx.Node, Index] | None:
    """Where an element is a written one, and which of what. `m[1:3, 2:5] = x` writes to a part of a part, whose rest is
    as it was in `m`: read again at places counted from the part, a chain of such writes would double with each."""
    base, source = node.args[:2]
    if op_name(node) == "slice_scatter":
        dim = argument(node, 2, "dim", 0) % len(index)
        start, step, count = bounds_of_slice(node, 3, shape_of(base)[dim])
        if step != 1 or not count:
            return None
        inside, here = between(reader, index[dim], start, start + count)
        place = at_dim(index, dim, here)
    else:
        dim = argument(node, 2, "dim", 0) % len(index)
        which = int(place_of(argument(node, 3, "index"), shape_of(base)[dim]))
        inside, place = reader.fold(compare("eq", index[dim], which)), (*index[:dim], *index[dim + 1 :])
    inner = written(reader, source, place) if writes_to_part(source, node) else None
    return (inside, source, place) if inner is None else (logic("logical_and", inside, inner[0]), *inner[1:])


def writes_to_part(source: Any, node: fx.Node) -> bool:
    """Whether `source` is the part of the base that `node` writes to, with something written to a part of that."""
    if not isinstance(source, fx.Node) or op_name(source) not in ("slice_scatter", "select_scatter"):
        return False
    part, base = source.args[0], node.args[0]
    if op_name(part) != op_name(node).removesuffix("_scatter") or part.args[0] is not base:
        return False
    rank = len(shape_of(base))
    dims = [argument(part, 1, "dim", 0) % rank, argument(node, 2, "dim", 0) % rank]
    if op_name(part) == "select":
        places = [place_of(argument(*which, "index"), shape_of(base)[dims[0]]) for which in ((part, 2), (node, 3))]
    else:
        places = [bounds_of_slice(*which, shape_of(base)[dims[0]]) for which in ((part, 2), (node, 3))]
    return bool(dims[0] == dims[1] and places[0] == places[1])


def cat(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """A choice between the parts by the coordinate along `dim`."""
    parts, dim = list(node.args[0]), argument(node, 1, "dim", 0) % len(index)
    if any(len(shape_of(part)) != len(index) or not shape_of(part)[dim] for part in parts):
        return None
    term: Term | None = None
    stop = shape_of(node)[dim]
    for part in reversed(parts):
        start = stop - shape_of(part)[dim]
        inside, here = between(reader, index[dim], start, stop)
        piece = cast(reader.at(part, at_dim(index, dim, here)), value_of(node).dtype)
        term, stop = piece if term is None else where(inside, piece, term, value_of(node).dtype), start
    return term


def pad(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """The operand inside, the constant in the padding; mode "constant" only."""
    if op_name(node) == "pad" and argument(node, 2, "mode", "constant") != "constant":
        return None
    value = argument(node, 3 if op_name(node) == "pad" else 2, "value", 0) or 0
    sizes, inside, here = shape_of(node.args[0]), number(True, torch.bool), index
    for i in range(0, len(node.args[1]), 2):
        dim = len(index) - 1 - i // 2
        start = node.args[1][i]
        within, place = between(reader, index[dim], start, start + sizes[dim])
        inside, here = logic("logical_and", inside, within), at_dim(here, dim, place)
    return where(inside, reader.at(node.args[0], here), value, value_of(node).dtype)


# ---- along the rows --------------------------------------------------------------------------------------------------
def diff(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """Each element less the one before it; before the first stands `prepend`, of one element."""
    x, dim, prepend = node.args[0], named(node, "dim") % len(index), named(node, "prepend")
    if named(node, "n") != 1 or named(node, "append") is not None or value_of(x).dtype not in INTEGERS:
        return None
    earlier = reader.at(x, at_dim(index, dim, plus(index[dim], -1 if prepend is not None else 0)))
    later = reader.at(x, index if prepend is not None else at_dim(index, dim, plus(index[dim], 1)))
    if prepend is not None:
        first = constant(reader.at(prepend, at_dim(index, dim, affine({}, 0)))) if shape_of(prepend)[dim] == 1 else None
        # The line through the rows of x meets what stands before them: there is no need to tell the first row apart.
        before = constant(reader.at(x, at_dim(index, dim, affine({}, -1))))
        if not isinstance(earlier, Affine) or first is None or before != first:
            return None
    return apply("sub", [later, earlier], value_of(node).dtype)


def running_sum(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """Of zeros."""
    zeros = constant(reader.at(node.args[0], index)) == 0
    return number(0, value_of(node).dtype) if zeros else None


# ---- pointwise -------------------------------------------------------------------------------------------------------
LOGICAL = {
    "__and__": "logical_and", "bitwise_and": "logical_and", "__or__": "logical_or", "bitwise_or": "logical_or",
    "bitwise_not": "logical_not", "__xor__": "ne", "bitwise_xor": "ne", "logical_xor": "ne",
}  # fmt: skip
OF_TWO = {"min": "minimum", "max": "maximum"}

# Elementwise ops that carry no pointwise tag.
POINTWISE = ELEMENTWISE | {*OF_TWO, "detach"}


def pointwise(reader: ElementReader, node: fx.Node, index: Index) -> Term | None:
    """The op of the elements, each operand read at its broadcast index."""
    name = op_name(node)
    dtype = value_of(node).dtype if is_tensor(node) else None
    given = arguments(node)
    if given is None or dtype is None or torch.Tag.nondeterministic_seeded in node.target.tags:
        return None
    values, kwargs = given
    tensors = [value for value in values if isinstance(value, fx.Node)]
    if name in OF_TWO and len(tensors) != 2:
        return None  # a reduction
    if name in ("add", "sub", "rsub") and len(values) == 3 and values.pop() != 1:
        return None  # alpha
    if name in ("clamp_min", "clamp_max"):
        name, values = "clamp", [values[0], *([None] if name == "clamp_max" else []), values[1]]
    if name == "masked_fill":
        name, values = "where", [values[1], values[2], values[0]]
    if name == "rsub" and len(tensors) == 2:
        name, values = "sub", [values[1], values[0]]
    if name == "div" and kwargs == [("rounding_mode", "floor")] and dtype in INTEGERS:
        name, kwargs = "floor_divide", []
    if all(value_of(each).dtype == torch.bool for each in tensors) and dtype == torch.bool:
        name = LOGICAL.get(name, name)
    name = OF_TWO.get(name, name)
    common = common_dtype(name, tensors, values, dtype)
    if common is None or not hasattr(torch.ops.aten, name):
        return None
    args: list[Term | Plain] = []
    for value in values:
        if isinstance(value, fx.Node):
            element = reader.at(value, broadcast(index, value))
            args.append(cast(element, common) if name != "where" and shape_of(value) else element)
        else:
            args.append(value)
    return apply(name, args, dtype, kwargs)


def arguments(node: fx.Node) -> tuple[list[Any], list[tuple[str, Plain]]] | None:
    """Positional and keyword arguments as the schema has them, defaults left out; None for lists and the like."""
    schema = schema_of(node.target).arguments
    given = dict(zip((each.name for each in schema), node.args, strict=False)) | node.kwargs
    places = [each for each in schema if not each.kwarg_only]
    while places and places[-1].name not in given:
        places.pop()
    values = [given.get(each.name, each.default_value) for each in places]
    named = [(each.name, given[each.name]) for each in schema if each.kwarg_only and each.name in given]
    kwargs = [(name, value) for name, value in named if value != _default_of(schema, name)]
    plain = all(value is None or isinstance(value, (fx.Node, bool, int, float, str)) for value in values)
    simple = all(isinstance(value, (bool, int, float, str)) for _name, value in kwargs)
    tensors = all(is_tensor(value) for value in values if isinstance(value, fx.Node))
    return (values, kwargs) if plain and simple and tensors else None


def _default_of(schema: Sequence[Any], name: str) -> Any:
    return next(each.default_value for each in schema if each.name == name)


def common_dtype(
    name: str, tensors: Sequence[fx.Node], values: Sequence[Any], dtype: torch.dtype
) -> torch.dtype | None:
    """The dtype in which the op computes: operands are brought to it, because in a block a tensor may have no dims left
    and then would not take part in promotion. None for mixtures of more than two."""
    dtypes = {value_of(each).dtype for each in tensors}
    if name == "where" or len(dtypes) == 1:
        return dtype if name == "where" else dtypes.pop()
    if len(tensors) != 2 or len(values) != 2:
        return None
    return torch.result_type(value_of(tensors[0]), value_of(tensors[1]))


RULES: dict[str, Rule] = {
    **dict.fromkeys(("full", "full_like"), filled(1)),
    "new_full": filled(2),
    "scalar_tensor": filled(0),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), filled(None, 1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), filled(None, 0)),
    "arange": arange,
    "index": wrapped,
    "diff": diff,
    "cumsum": running_sum,
    **dict.fromkeys(CASTS, converted),
    "triu": triangle("ge"),
    "tril": triangle("le"),
    "slice_scatter": scattered,
    "select_scatter": scattered,
    "cat": cat,
    **dict.fromkeys(PADS, pad),
}
