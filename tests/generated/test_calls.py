"""Generated programs that are called several times on real ranks: values, gradients and state are those of eager.

A failure prints the program; `draw(seed)` makes the same one again.
"""

from __future__ import annotations

import pytest

from tests.generated.called import Kind, check
from tests.generated.calls import draw, run

EAGER = {"inner_backend": "eager"}
WAYS = (
    EAGER,
    {**EAGER, "layout": "contiguous"},
    EAGER,
    EAGER,
    {**EAGER, "shard": "attention"},
    {"inner_backend": "aot_eager"},
)
PROGRAMS = Kind(draw, run, WAYS)


@pytest.mark.parametrize("p, first, count", [(2, 0, 2), pytest.param(3, 501, 1, marks=pytest.mark.zoo)])
def test_programs_called_several_times(ranks, p, first, count):
    """A sample; with -m zoo a thousand."""
    check(ranks, PROGRAMS, p, first, count)


@pytest.mark.zoo
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_programs_called_several_times(ranks, first):
    check(ranks, PROGRAMS, 2 + first // 500, first, 50)


@pytest.mark.zoo
@pytest.mark.parametrize("seed", [24, 44, 67, 19001, 31163, 31373, 34033])
def test_programs_that_failed_once(ranks, seed):
    """A length that a guard fixes while layouts are chosen, a row picked from blocks of open number, chunks behind
    blocks, an early start of as many heads as there are blocks, a counter in a graph of one row, which no ranks
    share, a mask over no tokens."""
    check(ranks, PROGRAMS, 2, seed, 1)
