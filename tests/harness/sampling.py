"""Of many cases the normal run has a sample, and the long sweep (`-m zoo`) all.

    @pytest.mark.sample(3)                               # one of three, of all combinations
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("name", NAMES)

The sample lies across: each layout is run, and each name where there are at least as many layouts as are left out.
"""

from __future__ import annotations

import pytest


def mark_what_is_swept(items: list[pytest.Item]) -> None:
    """Marks as `zoo` what is not in the sample."""
    for item in items:
        marker = item.get_closest_marker("sample")
        if marker is not None and place(item) % marker.args[0]:
            item.add_marker(pytest.mark.zoo)


def place(item: pytest.Item) -> int:
    """The sum of the places of its parameters, each in its own list."""
    indices: dict[str, int] = item.callspec.indices  # type: ignore[attr-defined]
    lists = [marker.args[0] for marker in item.iter_markers("parametrize")]
    first = [(names.split(",")[0].strip() if isinstance(names, str) else names[0]) for names in lists]
    return sum(indices[name] for name in first)
