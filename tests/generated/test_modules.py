"""Generated modules on real ranks: what they return, every gradient and the state are those of eager, call after call.

A failure prints the module; `draw(seed)` makes the same one again.
"""

from __future__ import annotations

import pytest

from tests.generated.called import Kind, check
from tests.generated.modules import draw, run

EAGER = {"inner_backend": "eager"}
WAYS = (
    EAGER,
    {**EAGER, "layout": "contiguous"},
    {**EAGER, "outputs": "lazy"},
    EAGER,
    {**EAGER, "shard": "attention"},
    {"inner_backend": "aot_eager"},
)
MODULES = Kind(draw, run, WAYS)


@pytest.mark.parametrize("p, first, count", [(2, 0, 2), pytest.param(3, 501, 1, marks=pytest.mark.zoo)])
def test_modules_called_several_times(ranks, p, first, count):
    """A sample; with -m zoo five hundred."""
    check(ranks, MODULES, p, first, count)


@pytest.mark.zoo
@pytest.mark.parametrize("first", range(0, 500, 25))
def test_five_hundred_modules(ranks, first):
    check(ranks, MODULES, 2 + first // 250, first, 25)
