"""Sizes of a program as expressions in one form, by what its guards say of them.

torch keeps a size as it was computed. That a length padded to whole chunks is a number of chunks, it does not see:

    size                        here                     where a guard says that there are 4 chunks
    n + -n % 64                 64 * ((n + 63) // 64)    256, and n is one of 193, ..., 256
    n + (64 - n % 64) % 64      64 * ((n + 63) // 64)    256
    (n + -n % 64) // 64         (n + 63) // 64           4

Remainders and rounded quotients by a number become floors, and what the divisor divides stands before them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary, proxy

import sympy
from sympy.core.relational import Relational

from ringopt.torch_compat.symbolic_shapes import (
    CeilToInt,
    FloorDiv,
    IntTrueDiv,
    Max,
    Mod,
    PythonMod,
    ShapeEnv,
    range_of,
)


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
        self.unequal = set[sympy.Basic]()  # differences that are not 0
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
        if isinstance(made, Max):
            made = self.largest(made)
        if isinstance(made, FloorDiv) and not is_positive(made.divisor):
            made = self.quotient(made)
        if (
            isinstance(made, (Mod, PythonMod)) and self.bounds(made.args[0])[0] >= 0
        ):  # m % (64 * m), of m chunks, 1 or more
            whole, by = made.args
            made = whole if self.bounds(sympy.expand(by - whole))[0] > 0 else made
        return cast(sympy.Basic, made.xreplace(self.fixed))

    def quotient(self, size: FloorDiv) -> sympy.Basic:
        """A number where it is one, of a symbol that is a multiple: n // (n // 16) is 16."""
        for each in self.as_multiples():
            found = FloorDiv(size.base.xreplace(each), size.divisor.xreplace(each))
            if found.is_Integer:
                return cast(sympy.Basic, found)
        return size

    def largest(self, size: Max) -> sympy.Basic:
        """That of some sizes which is no smaller than any other, where it is known which."""
        for one in size.args:
            if all(one is other or self.bounds(one)[0] >= self.bounds(other)[1] for other in size.args):
                return cast(sympy.Basic, one)
        return size

    def are_equal(self, one: sympy.Basic, other: sympy.Basic) -> bool:
        """Whether guards prove two sizes to be equal, for all values of their symbols."""
        rest = sympy.expand(self(one) - self(other))
        return rest == 0 or any(sympy.expand(self(rest.xreplace(each))) == 0 for each in self.as_multiples())

    def decide(self, claim: sympy.Basic) -> bool | None:
        """Whether a comparison of two sizes holds for all values of their symbols, or for none; None where guards and
        ranges prove neither."""
        if isinstance(claim, (sympy.Or, sympy.And)):
            parts, decides = [self.decide(part) for part in claim.args], isinstance(claim, sympy.Or)
            return decides if decides in parts else None if None in parts else not decides
        if not isinstance(claim, Relational):
            return None
        equal = isinstance(claim, (sympy.Eq, sympy.Ne))
        if equal and self.are_equal(*claim.args):
            return isinstance(claim, sympy.Eq)
        low, high = self.bounds(sympy.expand(self(claim.lhs) - self(claim.rhs)))
        if equal:
            differ = not low <= 0 <= high or self.difference(claim) in self.unequal
            return isinstance(claim, sympy.Ne) if differ else None
        kind = type(claim)
        at_ends = [bool(kind(sympy.Integer(end), 0)) for end in (low, high)]
        return at_ends[0] if at_ends[0] == at_ends[1] else None

    def difference(self, claim: sympy.Basic) -> sympy.Basic:
        """Of the two sides, but for a factor."""
        found = sympy.expand(self(claim.lhs) - self(claim.rhs)).primitive()[1]
        return -found if found.could_extract_minus_sign() else found

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
        claims = [guard.expr for guard in guards if isinstance(guard.expr, Relational)]
        equalities = [claim for claim in claims if isinstance(claim, sympy.Eq)]
        self.seen, before = len(guards), -1
        while len(self.fixed) > before:
            before = len(self.fixed)
            for each in equalities:
                self.learn(each)
        for each in claims:
            self.learn_least(each)
        self.unequal = {self.difference(each) for each in claims if isinstance(each, sympy.Ne)}

    def learn(self, equal: sympy.Eq) -> None:
        """What is equal to zero fixes the floor in it, if there is one, or makes a symbol a multiple of a number. With
        its floors fixed it may be of one symbol alone: n is 8, of two chunks of 4 without padding."""
        left, right = equal.args
        zero = sympy.expand(self(left) - self(right))
        if right.is_Integer and isinstance(left, sympy.Function):
            self.fix(left, right)
        rest, (factor, alone) = zero.as_coeff_Add()[0], zero.as_coeff_Add()[1].as_coeff_Mul()
        if alone.is_Symbol and (rest / factor).is_Integer:
            self.fix(alone, -rest / factor)
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
        elif symbol.is_Symbol and part > 0 and (1 / part).is_Integer and (symbol, 1 / part) not in self.multiples:
            self.multiples[symbol, 1 / part] = function
            self.made.clear()

    def learn_least(self, claim: sympy.Basic) -> None:
        """What has to be so many at least, where a guard says that of a floor: the base is then longer."""
        if not isinstance(claim, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
            return
        strict = int(isinstance(claim, (sympy.Gt, sympy.Lt)))
        rest = sympy.expand(self(claim.gts) - self(claim.lts)) - strict  # 0 or more
        more, (number, function) = rest.as_coeff_Add()[0], rest.as_coeff_Add()[1].as_coeff_Mul()
        if isinstance(function, FloorDiv) and number > 0 and is_positive(function.divisor):
            least = -(more // number)  # of the floor
            inside, symbol = function.base.as_coeff_Add()
            low, high = self.ranges.get(symbol, (-sys.maxsize, sys.maxsize))
            self.ranges[symbol] = max(low, int(least * function.divisor - inside)), high
            self.made.clear()

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
        low, high = range_of(written, self.env, narrower)
        rest = dict[sympy.Basic, tuple[int, int]]()  # 64 * (n // 64) is n - r, of a remainder r
        quotients = dict[sympy.Basic, sympy.Basic]()
        floors = written.atoms(FloorDiv)
        within = {each for outer in floors for each in outer.atoms(FloorDiv) if each is not outer}
        for each in floors - within:
            if is_positive(each.divisor):
                remainder = sympy.Dummy(integer=True)
                rest[remainder] = 0, int(each.divisor) - 1
                quotients[each] = (each.base - remainder) / each.divisor
        if not quotients:
            return low, high
        least, most = range_of(sympy.expand(written.xreplace(quotients)), self.env, narrower | rest)
        return max(low, least), min(high, most)


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
