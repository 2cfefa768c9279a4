"""Of many cases the normal run has a sample, and the long sweep (`-m zoo`) all.

    @pytest.mark.sample(3)                               # one of three, of all combinations
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", NAMES)

The sample lies across: each layout is run, and each name where there are at least as many layouts as are left out.
"""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest


def mark_what_is_swept(items: list[pytest.Item]) -> None:
    """Marks as `zoo` what is not in the sample. `items` are all cases of a test, in pytest's order, or those that were
    asked for by name."""
    seen: Counter[str] = Counter()
    for item in items:
        marker, test = item.get_closest_marker("sample"), item.nodeid.partition("[")[0]
        if marker is not None and diagonal(seen[test], sizes(item)) % marker.args[0]:
            item.add_marker(pytest.mark.zoo)
        seen[test] += 1


def sizes(item: pytest.Item) -> list[int]:
    """How many cases each parametrize has, the one that changes slowest first."""
    return [len(marker.args[1]) for marker in item.iter_markers("parametrize")]


def diagonal(number: int, lengths: list[int]) -> int:
    """The sum of the places that the case of this number has in each list."""
    return sum(number // prod(lengths[place + 1 :]) % length for place, length in enumerate(lengths))
