"""Sizes that may be symbolic ("open"): an int, or torch's SymInt, which stands for any length.

While the passes run, an open size stands in the arguments of a node as the SymInt itself, so it is compared and
multiplied as an int is. Every answer to `a < b` or `int(a)` that does not hold for all values becomes a guard: another
answer compiles the graph anew. So no pass can be wrong about a length; one that asks too much only makes the graph
serve fewer of them. `same` and `divides` ask for a proof instead, and leave no guard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from ringopt.expr.sizes import KnownSizes
from ringopt.torch_compat.fake_tensors import detect_fake_mode
from ringopt.torch_compat.operators import ASSERT_SCALAR
from ringopt.torch_compat.symbolic_shapes import (
    FloorDiv,
    SymNode,
    compute_unbacked_bindings,
    computed,
    free_unbacked_symbols,
    statically_known_true,
)

OPEN = (torch.SymInt, torch.SymFloat, torch.SymBool)

# An axis without a known bound is taken to be this long.
LONGEST = 1 << 40


def plain(size: Any) -> Any:
    """The int of a size that a guard has fixed meanwhile; else the size as it is."""
    if not isinstance(size, torch.SymInt):
        return size
    found = formula(size)
    return int(found) if found.is_Integer else size


def is_open(size: Any) -> bool:
    """Whether a size (or a number) is still symbolic: no guard has fixed it."""
    return isinstance(plain(size), OPEN)


def formula(size: Any) -> Any:
    """A value that is equal for equal sizes: the int, or the sympy expression in the one form of `KnownSizes`."""
    if not isinstance(size, OPEN):
        return size
    expression, env = size.node.expr, size.node.shape_env
    return expression if env is None else KnownSizes.of(env)(expression)


@dataclass(frozen=True)
class Linear:
    """A size that is step * count + offset, as of a Dim derived from another: it tells the count, which is a symbol or
    the floor of a quotient."""

    count: sympy.Basic
    step: int
    offset: int

    @classmethod
    def of(cls, size: Any) -> Linear | None:
        """Of a `formula`; None of a number, and of any other expression."""
        if not isinstance(size, sympy.Basic):
            return None
        offset, rest = sympy.expand(size).as_coeff_Add()
        step, count = rest.as_coeff_Mul()
        known = (count.is_Symbol or isinstance(count, FloorDiv)) and step.is_Integer and offset.is_Integer and step > 0
        return cls(count, int(step), int(offset)) if known else None

    @staticmethod
    def counts(sizes: Iterable[Any]) -> dict[Any, int]:
        """What the sizes at hand tell: of each `formula` of an open one, and of its count."""
        found: dict[Any, int] = {}
        for size in filter(is_open, sizes):
            found[formula(size)] = at_hand(size)
            if (linear := Linear.of(formula(size))) is not None:
                found[linear.count] = linear.solved(at_hand(size))
        return found

    def solved(self, size: Any) -> Any:
        """The count where this is `size`, an int or a Proxy."""
        less = size - self.offset if self.offset else size
        return less // self.step if self.step > 1 else less


@dataclass(frozen=True)
class SymbolPlaces:
    """Where a call of a graph has its open sizes: by symbol the input, its dim or None if it is the size itself, and
    what that is of the symbol."""

    places: Mapping[sympy.Symbol, tuple[int, int | None, Linear]] = field(default_factory=dict)

    @classmethod
    def of(cls, values: Sequence[Any]) -> SymbolPlaces:
        """Of the inputs that a graph was made for, tensors and sizes."""
        found: dict[sympy.Symbol, tuple[int, int | None, Linear]] = {}
        for place, value in enumerate(values):
            sizes = [(None, value)] if isinstance(value, torch.SymInt) else [*enumerate(getattr(value, "shape", ()))]
            for dim, size in sizes:
                linear = Linear.of(size.node.expr) if is_open(size) else None
                if linear is not None and isinstance(linear.count, sympy.Symbol):
                    found.setdefault(linear.count, (place, dim, linear))
        return cls(found)

    def cover(self, size: Any) -> bool:
        """Whether a call has all symbols of a `formula`."""
        return getattr(size, "free_symbols", set()) <= self.places.keys()

    def values(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, Any]:
        """Of the symbols in the call of these inputs."""
        return {
            symbol: linear.solved(inputs[place] if dim is None else inputs[place].shape[dim])
            for symbol, (place, dim, linear) in self.places.items()
        }

    def reader(self, inputs: Sequence[Any]) -> Callable[[Any], int]:
        """What a `formula` is in the call of these inputs."""
        known = {symbol: sympy.Integer(value) for symbol, value in self.values(inputs).items()}
        return lambda size: size if isinstance(size, int) else int(size.xreplace(known))


def same(one: Any, other: Any) -> bool:
    """Whether two sizes are provably equal for all values of their symbols."""
    sizes = [formula(size) for size in (one, other)]
    env = next((size.node.shape_env for size in (one, other) if isinstance(size, OPEN)), None)
    if sizes[0] == sizes[1] or env is None:
        return bool(sizes[0] == sizes[1])
    return KnownSizes.of(env).are_equal(*map(sympy.sympify, sizes)) or statically_known_true(one == other)


def divides(size: Any, whole: Any) -> bool:
    """Whether `size` provably divides `whole` for all values of their symbols."""
    return same(whole % size, 0) or _is_multiple(formula(whole), formula(size))


def _is_multiple(whole: Any, size: Any) -> bool:
    """By a division of polynomials whose quotient has whole coefficients; a function (a floor) counts as a symbol:

    4 * ((n - 1) // 2) + 4  =  4 * ((n - 1) // 2 + 1)"""
    one, other = map(sympy.sympify, (whole, size))
    parts = one.atoms(sympy.Function) | other.atoms(sympy.Function)
    functions = {part: sympy.Dummy(integer=True) for part in parts if part.is_integer}
    one, other = one.xreplace(functions), other.xreplace(functions)
    symbols = one.free_symbols | other.free_symbols
    if not symbols or not all(each.is_polynomial(*symbols) for each in (one, other)):
        return False
    quotient, rest = sympy.Poly(one, *symbols, domain="QQ").div(sympy.Poly(other, *symbols, domain="QQ"))
    return bool(rest.is_zero and all(number.is_Integer for number in quotient.coeffs()))


def place_of(index: Any, size: Any) -> Any:
    """The index counted from the start: negative ones count from the end, as in Python."""
    return index + size if index < 0 else index


def slice_of(size: Any, start: Any = None, end: Any = None, step: int = 1) -> tuple[Any, int, Any]:
    """(first, step, count) of a slice of a dim of `size`: `slice.indices`, for symbolic sizes too."""

    def inside(index: Any) -> Any:
        index = place_of(index, size)
        return 0 if index < 0 else size if index > size else index

    first = 0 if start is None else inside(start)
    last = size if end is None or (isinstance(end, int) and end >= sys.maxsize) else inside(end)
    return first, step, 0 if last <= first else (last - first + step - 1) // step


def at_hand(size: Any) -> int:
    """The hint: the size for the inputs at hand. For figures in a report and for samples only: no guard is made, so
    nothing that must hold for other lengths may depend on it."""
    if not isinstance(size, OPEN):
        return int(size)
    node = size.node
    if node.hint is None:  # sums of sizes that cross a graph break may have lost theirs; made anew, they have one
        node = SymNode(node.expr, node.shape_env, node.pytype, None)
    return int(node.hint)


def elements(sizes: Sequence[Any]) -> int:
    """How many a tensor has at the sizes at hand, for choices that are right either way; 0 where data decide a size."""
    return 0 if any(free_unbacked_symbols(size) for size in sizes if is_open(size)) else prod(map(at_hand, sizes))


def least_and_most(size: Any) -> tuple[int, int]:
    """The least and the most that the size may be: LONGEST or more where no limit is known."""
    if not isinstance(size, OPEN):
        return int(size), int(size)
    return KnownSizes.of(size.node.shape_env).bounds(size.node.expr)


def longest(size: Any) -> int:
    """An upper bound of the size, LONGEST where none is known."""
    return min(least_and_most(size)[1], LONGEST)


# ---- in the arguments of nodes ---------------------------------------------------------------------------------------
def into_arguments(graph: fx.Graph) -> None:
    """Replaces nodes that compute sizes by the SymInts themselves, in the arguments of all nodes."""

    def size(node: fx.Node) -> Any:
        value = node.meta.get("val")
        return value if isinstance(value, OPEN) else node

    for node in graph.nodes:
        node.args, node.kwargs = fx.map_arg(node.args, size), fx.map_arg(node.kwargs, size)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), OPEN):
            graph.erase_node(node)


def into_nodes(graph: fx.Graph) -> None:
    """The inverse of `into_arguments`: nodes compute each symbolic size from sizes of the inputs, which come first. One
    that guards have fixed is a number: compilers do not see that (n + -n % 64) // ((n + -n % 64) // 64) is 64."""
    inputs_first(graph)
    written = Written(graph)

    def node_of(size: Any) -> Any:
        size = plain(size)
        return written.of(size.node.expr) if isinstance(size, OPEN) else size

    with graph.inserting_before(behind_inputs(graph)):
        for node in list(graph.nodes):
            if node.op != "placeholder":
                node.args, node.kwargs = map_aggregate(node.args, node_of), map_aggregate(node.kwargs, node_of)
    written.give_values()


def inputs_first(graph: fx.Graph) -> None:
    """Moves the inputs before all else: one of them may be cut into rows before the next one."""
    other = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for node in graph.find_nodes(op="placeholder"):
        if other is not None and other < node:
            other.prepend(node)


def behind_inputs(graph: fx.Graph) -> fx.Node:
    """The first node that may read all inputs."""
    inputs = graph.find_nodes(op="placeholder")
    return inputs[-1].next if inputs else next(iter(graph.nodes))


def into_assertions(graph: fx.Graph, formulas: Iterable[sympy.Basic]) -> None:
    """Adds a runtime assertion for each of `formulas`, conditions on the sizes of the inputs."""
    written = Written(graph)
    with graph.inserting_before(behind_inputs(graph)):
        for formula in formulas:
            message = f"this program was made for inputs with {formula}"
            graph.call_function(ASSERT_SCALAR, (written.of(formula), message))
    written.give_values()


class Written:
    """Expressions of sizes as nodes, made at the graph's insertion point."""

    def __init__(self, graph: fx.Graph):
        self.graph, self.inputs = graph, graph.find_nodes(op="placeholder")
        self.tracer = fx.proxy.GraphAppendingTracer(graph)  # one, for torch.sym_max asks that there be no other
        self.symbols: dict[sympy.Symbol, fx.Proxy] = {}
        self.made: dict[Any, Any] = {}

    def of(self, formula: sympy.Basic) -> Any:
        if formula not in self.made:
            for symbol in sorted(formula.free_symbols - self.symbols.keys(), key=str):
                size, linear = source_of(symbol, self.graph, self.inputs)
                self.symbols[symbol] = linear.solved(fx.Proxy(size, self.tracer))
            found = computed(formula, self.symbols)
            self.made[formula] = found.node if isinstance(found, fx.Proxy) else found
        return self.made[formula]

    def give_values(self) -> None:
        for node in self.graph.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = node.target(*fx.map_arg(node.args, lambda arg: arg.meta["val"]))


def source_of(symbol: sympy.Symbol, graph: fx.Graph, inputs: Iterable[fx.Node]) -> tuple[fx.Node, Linear]:
    """A scalar input, or a node that reads the size of one, and how it tells `symbol`. AssertionError without any."""
    for node in inputs:
        value = node.meta.get("val")
        for dim, size in [(None, value), *enumerate(getattr(value, "shape", ()))]:
            linear = Linear.of(formula(size))
            if linear is not None and linear.count == symbol:
                return node if dim is None else graph.call_function(torch.ops.aten.sym_size.int, (node, dim)), linear
    raise AssertionError(f"no input has the size {symbol}")


def note_value(node: fx.Node, value: Any) -> None:
    """The fake value of a node that was run again, and which sizes and numbers come up in it that are known only when
    the program runs."""
    node.meta["val"] = value
    shape_env = getattr(detect_fake_mode(), "shape_env", None)
    if shape_env is not None and (symbols := compute_unbacked_bindings(shape_env, value)):
        node.meta["unbacked_bindings"] = symbols
