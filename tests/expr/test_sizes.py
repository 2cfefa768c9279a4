"""Sizes in one form: lengths that are padded to whole chunks, and what guards fix."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ringopt.expr.sizes import KnownSizes
from ringopt.ir.symbolic_sizes import divides, formula, is_open, least_and_most, plain, same
from ringopt.torch_compat.symbolic_shapes import ShapeEnv


def at_length(length: int, look: Callable[[Any], Any]) -> Any:
    """What `look` gives of an open length."""
    found: list[Any] = []

    def program(x: Tensor) -> Tensor:
        found.append(look(x.shape[0]))
        return x + 1

    make_fx(program, tracing_mode="symbolic")(torch.ones(length))
    return found[0]


# As models pad a length, and what it is then.
PADDED: dict[str, Callable[[Any], Any]] = {
    "a remainder": lambda n: n + -n % 64,
    "a remainder of a remainder": lambda n: n + (64 - n % 64) % 64,
    "rounded up": lambda n: (n + 63) // 64 * 64,
    "rounded down": lambda n: -(-n // 64) * 64,
    "a ceiling": lambda n: math.ceil(n / 64) * 64,
    "twice": lambda n: (m := n + -n % 64) + -m % 64,
}


@pytest.mark.parametrize("name", PADDED)
def test_a_padded_length_is_whole_chunks(name: str) -> None:
    def look(n: Any) -> Any:
        padded = PADDED[name](n)
        chunks = padded // 64
        assert same(padded, (n + 63) // 64 * 64) and same(chunks, (n + 63) // 64)
        assert divides(64, padded) and not divides(128, padded) and not same(padded, n)
        assert plain(padded // chunks) == 64  # a view to -1 rows has as many
        return formula(padded).subs({each: 200 for each in formula(padded).free_symbols})

    assert at_length(100, look) == 256


def test_forms_are_equal_to_what_they_are_made_of() -> None:
    """At every length, of both signs of the remainder."""
    forms: list[Callable[[Any], Any]] = [
        *PADDED.values(), lambda n: n % 7, lambda n: -n % 7, lambda n: (3 * n + 5) // 4, lambda n: (5 - 3 * n) // 4,
        lambda n: (8 * n + 70) // 8, lambda n: (n - 70) // 64 + n // 3, lambda n: (n // 4 * 4 + 3) // 4,
    ]  # fmt: skip
    for form in forms:
        written = at_length(100, lambda n, form=form: (formula(n), formula(form(n))))
        for length in range(2, 200):
            assert written[1].xreplace({written[0]: sympy.Integer(length)}) == form(length), (written[1], length)


def test_a_guard_on_the_number_of_chunks_fixes_the_padded_length_and_bounds_the_other() -> None:
    def look(n: Any) -> None:
        padded = n + -n % 64
        before = least_and_most(n)
        assert is_open(padded) and before[1] > 1 << 40
        assert padded // 64 == 4  # as a loop over chunks asks
        assert plain(padded) == 256 and plain(padded // 64) == 4 and is_open(n)
        assert [least_and_most(size) for size in (n, n + 3, padded)] == [(193, 256), (196, 259), (256, 256)]

    at_length(200, look)


def test_what_is_known_of_a_program_goes_with_it() -> None:
    """A process may compile many. (torch's own caches keep the last of them.)"""
    env, n = ShapeEnv(), sympy.Symbol("n", integer=True, positive=True)
    assert KnownSizes.of(env)(n) == n
    gone = weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None


def test_what_one_guard_says_settles_another() -> None:
    def look(n: Any) -> None:
        assert n // 8 + n // 6 == 23  # of two floors neither is fixed
        assert is_open(n // 8) and is_open(n // 6)
        assert n // 6 == 13
        assert plain(n // 8) == 10 and least_and_most(n) == (80, 83)

    at_length(83, look)


def test_a_length_that_a_number_divides() -> None:
    def look(n: Any) -> None:
        assert not same(n // 4 * 4, n)
        assert n % 4 == 0
        assert same(n // 4 * 4, n) and same((n + -n % 4) // 4 * 4, n) and divides(4, n) and not divides(8, n)

    at_length(40, look)


def test_a_chunk_of_a_length_that_a_number_divides_has_as_many_rows() -> None:
    """As views spell it, whose other dims are known."""

    def look(n: Any) -> None:
        assert is_open(n // (n // 16))
        assert n % 16 == 0
        assert plain(n // (n // 16)) == 16 and is_open((n // 16) // (n // 32))
        assert divides(4, n // (n // 16))

    at_length(48, look)


def test_a_length_of_as_many_rows_as_its_parts_have() -> None:
    """As torch compares the elements of a view: blocks of four rows of 16 numbers."""

    def look(n: Any) -> None:
        blocks = n // 4
        assert n // blocks == 4 and not same(4 * blocks, n)
        assert 16 * n == 16 * blocks * (n // blocks)
        assert same(4 * blocks, n) and divides(4, n)

    at_length(40, look)


def test_a_length_that_needs_no_padding() -> None:
    """By a guard that the padding is none."""

    def look(n: Any) -> None:
        padded = n + -n % 4
        assert -n % 4 == 0
        assert same(padded, n) and same(padded // 4 * 4, n)

    at_length(40, look)


def test_so_many_chunks_of_a_length_that_needs_no_padding_fix_it() -> None:
    def look(n: Any) -> None:
        padded = n + -n % 4
        assert padded == 12 and is_open(n)  # one of 9, 10, 11, 12
        assert 8 * padded == 8 * n
        assert same(n, 12) and not is_open(n)

    at_length(12, look)


def test_a_guard_on_the_fewest_chunks_bounds_the_length() -> None:
    def look(n: Any) -> None:
        chunks = (n + -n % 64) // 64
        assert chunks >= 2
        assert least_and_most(n)[0] == 65 and least_and_most(chunks)[0] == 2 and is_open(chunks)
        assert plain(2 % (8 * chunks)) == 2 and same(chunks % (64 * chunks), chunks)  # less than what it is divided by
        assert same(torch.sym_max(1, chunks), chunks)

    at_length(200, look)


# What torch asks of the views and strides of a program that works chunk by chunk, of two chunks or more; None: a guard.
CLAIMS: dict[str, tuple[Callable[[Any, Any], Any], bool | None]] = {
    "whole chunks": (lambda n, m: (64 * (n + -n % 64)) % 4096 == 0, True),
    "as long as its chunks": (lambda n, m: n <= 64 * m, True),
    "a chunk shorter": (lambda n, m: n + 64 <= 64 * m, False),
    "shorter": (lambda n, m: n + 1 <= 64 * m, None),
    "a row": (lambda n, m: 4 * m * 64 < 2, False),
    "another number": (lambda n, m: m == n + -n % 64, False),
    "as many": (lambda n, m: m == 3, None),
    "other": (lambda n, m: m != n, True),
    "either": (lambda n, m: sympy.Or(sympy.Eq(formula(m), 0), sympy.Le(formula(m), formula(n))), True),
    "both": (lambda n, m: sympy.And(sympy.Eq(formula(m), 3), sympy.Le(formula(m), formula(n))), None),
    "neither": (lambda n, m: sympy.Or(sympy.Eq(formula(m), 0), sympy.Lt(formula(m), 1)), False),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_guards_decide_what_follows_from_them(name: str) -> None:
    def look(n: Any) -> Any:
        chunks = (n + -n % 64) // 64
        assert chunks >= 2
        made = CLAIMS[name][0](n, chunks)
        claim = made if isinstance(made, sympy.Basic) else made.node.expr
        decided = KnownSizes.of(n.node.shape_env).decide(claim)
        for length in range(65, 400):
            (symbol,) = formula(n).free_symbols
            assert decided is None or bool(claim.xreplace({symbol: sympy.Integer(length)})) == decided
        return decided

    assert at_length(200, look) is CLAIMS[name][1]


def test_what_a_guard_says_is_unequal_is_so_in_any_form() -> None:
    """As torch asks of the strides of a padded length, whose last rows are cut off."""

    def look(n: Any) -> None:
        padded = n + -n % 4

        def claims(made: Any) -> bool | None:
            return KnownSizes.of(n.node.shape_env).decide(made.node.expr)

        assert claims(32 * (padded // 4) != 8 * n) is None
        assert 8 * padded != 8 * n
        assert claims(32 * (padded // 4) != 8 * n) is True and claims(-n == -4 * (padded // 4)) is False
        assert claims(padded != n + 1) is None

    at_length(50, look)


def test_a_floor_within_a_floor_is_bounded() -> None:
    def look(n: Any) -> None:
        least, most = least_and_most(n // ((n + 15) // 16))
        assert least <= 16 <= most or least <= n // ((n + 15) // 16)

    at_length(400, look)
