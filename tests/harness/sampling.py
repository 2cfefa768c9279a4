"""Cases of which the normal run has a sample, and the long sweep (`-m zoo`) all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], every: int) -> list[Any]:
    """The first of every so many cases for the normal run; the others are marked for the sweep.

    @pytest.mark.parametrize("p, name", sample(product((2, 3), NAMES), 4))
    """
    return [case if place % every == 0 else swept(case) for place, case in enumerate(cases)]


def swept(case: Any) -> Any:
    """One case, of one argument or of a tuple of them, in the sweep only."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.zoo)
