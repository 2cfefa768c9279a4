"""Open sizes: the expressions behind them, what is known of these, and how they are computed."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    ShapeEnv,
    _constrain_range_for_size,
    compute_unbacked_bindings,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils._sympy import functions
from torch.utils._sympy.functions import CeilToInt, FloorDiv, IntTrueDiv, Max, Mod, PythonMod
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "FUNCTIONS",
    "CeilToInt",
    "FloorDiv",
    "GuardAsked",
    "GuardOnDataDependentSymNode",
    "IntTrueDiv",
    "Max",
    "Mod",
    "PickedSizes",
    "PythonMod",
    "ShapeEnv",
    "SymNode",
    "asserted_size",
    "compute_unbacked_bindings",
    "computed",
    "float_symbol",
    "free_unbacked_symbols",
    "range_of",
    "statically_known_true",
    "unbacked_size",
    "without_guards",
]

# ShapeEnv(): of one program, its symbols, var_to_range and guards; bound_sympy(expr) has the upper bound;
#     replace(expr) has what stands for symbols that are equal to others.
# SymNode(expr, shape_env, type, hint): what a SymInt, SymFloat or SymBool is made of; `node.expr` of one is its
#     expression, fixed symbols replaced.
# statically_known_true(condition): adds no guard.
# free_unbacked_symbols(value): those in the sizes of a tensor that are known only when the program runs.
# compute_unbacked_bindings(shape_env, value): where in a value new ones come up, for node.meta["unbacked_bindings"].
# FloorDiv(a, b), Mod(a, b), PythonMod(a, b), CeilToInt(IntTrueDiv(a, b)): sizes as sympy expressions; a Mod is of sizes
#     that are not negative.
# GuardOnDataDependentSymNode: raised where a decision needs the number of one.

# The functions that sizes are written in beside sympy's own (FloorDiv, Mod, ...), by name, as they stand in files.
FUNCTIONS = {name: made for name, made in vars(functions).items() if isinstance(made, type)}


class Traceable(PythonReferenceAnalysis):
    """Also what torch spells for the numbers of sympy or Python alone: quotients, what is rounded, angles."""

    int_truediv = staticmethod(operator.truediv)
    cos, acos, cosh = (staticmethod(getattr(torch, f"_sym_{name}")) for name in ("cos", "acos", "cosh"))
    sin, asin, sinh = (staticmethod(getattr(torch, f"_sym_{name}")) for name in ("sin", "asin", "sinh"))
    tan, atan, tanh = (staticmethod(getattr(torch, f"_sym_{name}")) for name in ("tan", "atan", "tanh"))

    @staticmethod
    def floor_to_int(x: Any, _dtype: Any = None) -> Any:
        return _called(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, _dtype: Any = None) -> Any:
        return _called(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, _dtype: Any = None) -> Any:
        return _called(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, _dtype: Any = None) -> Any:
        return _called(round, x)

    @staticmethod
    def round_decimal(x: Any, digits: Any) -> Any:
        return _called(round, x, digits)

    @staticmethod
    def abs(x: Any) -> Any:
        return _called(operator.abs, x)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    """Python's own functions want numbers: of a proxy, a node that calls it."""
    tracer = next((x.tracer for x in args if isinstance(x, fx.Proxy)), None)
    return tracer.create_proxy("call_function", function, args, {}) if tracer else function(*args)


def computed(formula: sympy.Basic, values: dict[sympy.Symbol, Any]) -> Any:
    """An expression of sizes with these values for its symbols, which may be proxies of a graph."""
    return sympy_interp(Traceable, values, formula)


def range_of(formula: sympy.Basic, env: ShapeEnv, narrower: dict[sympy.Basic, tuple[int, int]]) -> tuple[int, int]:
    """The least and the most that an expression of sizes may be, by the ranges of its symbols, some of which are known
    to be narrower. `sys.maxsize` and its negative stand for no limit."""
    ranges = {symbol: env.var_to_range[symbol] for symbol in formula.free_symbols if symbol in env.var_to_range}
    found = bound_sympy(formula, ranges | {symbol: ValueRanges(*ends) for symbol, ends in narrower.items()})
    low = int(found.lower) if found.lower.is_Integer else -sys.maxsize
    return low, int(found.upper) if found.upper.is_Integer else sys.maxsize


def float_symbol(number: torch.SymFloat) -> Any:
    """The symbol of a float that Dynamo left open, as it was made (not what has replaced it since); None for another
    number."""
    symbol = number.node._expr
    return symbol if symbol.is_Symbol and symbol_is_type(symbol, SymT.FLOAT) else None


def unbacked_size(minimum: int) -> torch.SymInt:
    """In the fake form of an operator: a size that is known when the program runs. Not `get_ctx().new_dynamic_size`: by
    Dynamo's settings no data makes sizes, and this need not follow from data."""
    size: torch.SymInt = torch.library.get_ctx()._shape_env.create_unbacked_symint()
    _constrain_range_for_size(size, min=minimum)
    return size


class GuardAsked(Exception):
    """A decision about an open size that does not hold for all of them."""


@contextmanager
def without_guards(shape_env: ShapeEnv, follows: Callable[[Any], bool] = lambda expr: False) -> Iterator[None]:
    """A context in which what would become a guard raises GuardAsked instead, and nothing is noted, but for what
    `follows` from the guards that there are. ShapeEnv looks there whether it is frozen, before it records anything."""

    def refuse(expr: Any, value: Any) -> None:
        if not follows(expr):
            raise GuardAsked(f"{expr} is {value}")

    around = vars(shape_env).get("_check_frozen")
    shape_env._check_frozen = refuse
    try:
        yield
    finally:
        del shape_env._check_frozen
        if around is not None:
            shape_env._check_frozen = around


def asserted_size(size: torch.SymInt) -> int | None:
    """The number that a size of unknown parts is asserted to be, as the pieces of a split make up the whole."""
    env = size.node.shape_env
    for asserted in (each.expr for of_one in env.deferred_runtime_asserts.values() for each in of_one):
        sides = [env.replace(side) for side in getattr(asserted, "args", ())]
        if isinstance(asserted, sympy.Eq) and env.replace(size.node.expr) in sides:
            number = next((side for side in sides if side.is_Integer), None)
            if number is not None:
                return int(number)
    return None


class PickedSizes(ShapeEnv):
    """Of a program in which data decide sizes. Each stands for any number of rows: two at least, for a decision that
    is special to none or to one is none of the program's."""

    def __init__(self) -> None:
        super().__init__(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> torch.SymInt:
        size: torch.SymInt = super().create_unbacked_symint(*args, **kwargs)
        _constrain_range_for_size(size, min=2)
        return size
