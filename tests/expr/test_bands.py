"""Conditions as structural patterns: what is told from a term by its form, and what is not."""

from __future__ import annotations

import torch

from ringopt.expr import terms
from ringopt.expr.bands import Known, chunk_of, edges_of, first_keys, rate_of
from ringopt.expr.simplify import apply, compare
from ringopt.expr.value_ranges import RULES

Q, K, BOOL, INT = terms.axis("q"), terms.axis("k"), torch.bool, torch.int64


def remainder(x: terms.Term, rate: int) -> terms.Term:
    return apply("remainder", (x, rate), INT)


def test_keys_that_all_queries_see() -> None:
    assert first_keys(compare("lt", K, 3)) == 3
    assert first_keys(compare("lt", apply("add", (K, 2), INT), 3)) == 1
    assert first_keys(compare("lt", K, 0)) == first_keys(compare("lt", Q, 3)) == first_keys(compare("ge", K, 3)) == 0


def test_chunks() -> None:
    assert chunk_of(apply("floor_divide", (Q, 4), INT)) == 4
    for other in (Q, apply("floor_divide", (apply("add", (Q, 1), INT), 4), INT), remainder(Q, 4)):
        assert chunk_of(other) == 0


def test_every_so_many_keys() -> None:
    apart = apply("sub", (Q, K), INT)
    assert (
        rate_of(compare("eq", remainder(apart, 3), 0)) == rate_of(compare("eq", remainder(Q, 3), remainder(K, 3))) == 3
    )
    assert rate_of(compare("eq", remainder(apply("abs", (apart,), INT), 3), 0)) == 3
    assert rate_of(compare("eq", remainder(apart, 3), 1)) == 0
    assert rate_of(compare("eq", remainder(apply("add", (apart, 1), INT), 3), 0)) == 0
    assert rate_of(compare("eq", remainder(Q, 3), remainder(K, 4))) == 0
    assert rate_of(compare("eq", remainder(K, 3), 0)) == 0


def edges(values: list[float]) -> list[int] | None:
    known = Known({0: torch.tensor(values)}, {"q": len(values), "k": len(values)})
    return edges_of(*(terms.load(0, (axis,), torch.float32) for axis in (Q, K)), known)


def test_packed_sequences() -> None:
    assert edges([0, 0, 1, 1, 1, 7]) == [0, 2, 5, 6]
    assert edges([0, 0, 1, 1, 0, 0]) is None  # a number that comes again is one sequence, in two parts
    assert edges([0, 0, float("nan"), 1]) is None  # which equals nothing, itself included
    twice = [terms.load(0, (Q,), torch.float32)] * 2
    assert edges_of(*twice, Known({0: torch.zeros(2)}, {"q": 2, "k": 2})) is None
    later = [terms.load(0, (apply("add", (axis, 1), INT),), torch.float32) for axis in (Q, K)]
    assert edges_of(*later, Known({0: torch.zeros(3)}, {"q": 3, "k": 3})) is None


def test_bounds_of_pointwise_operators() -> None:
    """Those of all pairs of numbers between the bounds of the operands, where that is the narrowest."""
    bounds = [(-3, -1), (-2, 2), (0, 0), (1, 4)]
    for a in bounds:
        values = [abs(x) for x in range(a[0], a[1] + 1)]
        assert RULES["abs"](a) == (min(values), max(values))
        for b in bounds:
            for name, of in (("minimum", min), ("maximum", max)):
                pairs = [of(x, y) for x in range(a[0], a[1] + 1) for y in range(b[0], b[1] + 1)]
                assert RULES[name](a, b) == (min(pairs), max(pairs))
