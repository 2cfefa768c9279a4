"""Sizes of a program as expressions in one form, by what its guards say of them.

torch keeps a size as it was computed. That a length padded to whole chunks is a number of chunks, it does not see:

    size                        here                     where a guard says that there are 4 chunks
    n + -n % 64                 64 * ((n + 63) // 64)    256, and n is one of 193, ..., 256
    n + (64 - n % 64) % 64      64 * ((n + 63) // 64)    256
    (n + -n % 64) // 64         (n + 63) // 64           4

Remainders and rounded quotients by a number become floors, and what the divisor divides stands before them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import sympy

from ringopt.torch_compat.symbolic_shapes import CeilToInt, FloorDiv, IntTrueDiv, Mod, PythonMod, ShapeEnv, range_of


class KnownSizes:
    """Of one program: what its guards have fixed so far."""

    def __init__(self, env: ShapeEnv):
        self.env = proxy(env)  # which is the key by which these are kept
        self.seen = 0
        # Functions that are a number; the floors of symbols that are multiples, by symbol and divisor; what a symbol,
        # or another base of a floor, may be.
        self.fixed: dict[sympy.Basic, sympy.Basic] = {}
        self.multiples: dict[tuple[sympy.Basic, sympy.Basic], sympy.Basic] = {}
        self.ranges: dict[sympy.Basic, tuple[int, int]] = {}
        self.made: dict[sympy.Basic, sympy.Basic] = {}

    @staticmethod
    def of(env: ShapeEnv) -> KnownSizes:
        """With all guards that there are now."""
        if env not in _known:
            _known[env] = KnownSizes(env)
        sizes = _known[env]
        sizes.read()
        return sizes

    def __call__(self, size: sympy.Basic) -> sympy.Basic:
        """The size in the one form."""
        if size not in self.made:
            self.made[size] = self.write(size)
        return self.made[size]

    def write(self, size: sympy.Basic) -> sympy.Basic:
        """As `__call__`, anew."""
        if size in self.fixed or not size.args:
            return self.fixed.get(size, size)
        args = [self(each) for each in size.args]
        made = in_floors(size.func(*args) if tuple(args) != size.args else size)
        return cast(sympy.Basic, made.xreplace(self.fixed))

    def are_equal(self, one: sympy.Basic, other: sympy.Basic) -> bool:
        """Whether guards prove two sizes to be equal, for all values of their symbols."""
        rest = sympy.expand(self(one) - self(other))
        return rest == 0 or any(sympy.expand(self(rest.xreplace(each))) == 0 for each in self.as_multiples())

    def as_multiples(self) -> Iterator[dict[Any, Any]]:
        """Each symbol that is a multiple, as one: n is 4 * (n // 4). The floor itself stays."""
        for (symbol, number), function in self.multiples.items():
            yield {symbol: number * function, function: function}

    # ---- guards ------------------------------------------------------------------------------------------------------
    def read(self) -> None:
        """Learns from the guards that are new: again from those before, for one may settle what another says."""
        guards = self.env.guards
        if len(guards) == self.seen:
            return
        equalities = [guard.expr for guard in guards if isinstance(guard.expr, sympy.Eq)]
        self.seen, before = len(guards), -1
        while len(self.fixed) > before:
            before = len(self.fixed)
            for each in equalities:
                self.learn(each)

    def learn(self, equal: sympy.Eq) -> None:
        """What is equal to zero fixes the floor in it, if there is one, or makes a symbol a multiple of a number."""
        left, right = equal.args
        zero = sympy.expand(self(left) - self(right))
        if right.is_Integer and isinstance(left, sympy.Function):
            self.fix(left, right)
        terms = [each for each in sympy.Add.make_args(zero) if each.has(FloorDiv)]
        if len(terms) != 1:
            return
        number, function = terms[0].as_coeff_Mul()
        value = (terms[0] - zero) / number
        if not isinstance(function, FloorDiv):
            return
        part, symbol = value.as_coeff_Mul()
        if value.is_Integer:
            self.fix(function, value)
        elif symbol.is_Symbol and part > 0 and (1 / part).is_Integer:
            self.multiples[symbol, 1 / part] = function

    def fix(self, function: sympy.Basic, number: sympy.Basic) -> None:
        """Notes that a function is this number, and between which lengths a floor is."""
        if function in self.fixed:
            return
        self.fixed[function] = number
        self.made.clear()
        if isinstance(function, FloorDiv) and is_positive(function.divisor):
            more, symbol = function.base.as_coeff_Add()
            first = int(number * function.divisor - more)
            last = first + int(function.divisor) - 1
            low, high = self.ranges.get(symbol, (first, last))
            self.ranges[symbol] = max(low, first), min(high, last)

    def bounds(self, size: sympy.Basic) -> tuple[int, int]:
        """The least and the most that a size may be, by guards and by the ranges that torch has."""
        written = self(size)
        narrower = {each: self.ranges[each] for each in written.free_symbols & self.ranges.keys()}
        return range_of(written, self.env, narrower)


# By shape environment.
_known: WeakKeyDictionary[ShapeEnv, KnownSizes] = WeakKeyDictionary()


def in_floors(size: sympy.Basic) -> sympy.Basic:
    """A remainder or a rounded quotient by a number as a floor; anything else as it is."""
    if isinstance(size, (Mod, PythonMod)) and is_positive(size.args[1]):
        whole, by = size.args
        return cast(sympy.Basic, sympy.expand(whole - by * floor(whole, by)))
    if isinstance(size, FloorDiv) and is_positive(size.args[1]):
        return floor(*size.args)
    if isinstance(size, CeilToInt) and isinstance(size.args[0], IntTrueDiv) and is_positive(size.args[0].args[1]):
        whole, by = size.args[0].args
        return floor(whole + by - 1, by)
    return size


def is_positive(number: sympy.Basic) -> bool:
    """Whether it is a number that may divide."""
    return bool(number.is_Integer and number > 0)


def floor(whole: sympy.Basic, by: sympy.Basic) -> sympy.Basic:
    """`whole` // `by`, of which what `by` divides stands before the floor: (64 * m + n + 70) // 64 is
    m + 1 + (n + 6) // 64. -(-n // 64) is (n + 63) // 64."""
    before, inside = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(sympy.expand(whole)):
        number, rest = term.as_coeff_Mul()
        if rest == 1 or number % by == 0:
            before, inside = before + number // by * rest, inside + number % by * rest
        else:
            inside += term
    if inside.as_coeff_Add()[1].could_extract_minus_sign():
        return before - floor(by - 1 - inside, by)
    return before + FloorDiv(inside, by)
