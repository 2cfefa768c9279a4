"""torchtitan's compilation of each block, with options from `ringopt.defaults`: losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="pip install torchtitan")

from tests.integrations.titan_trainings import stepped
from tests.integrations.trainings import EAGER, LONG, check_alike

CASES = {
    "llama": ("llama", 2, EAGER),
    "llama, FSDP2 beside it": ("llama", 4, EAGER),
    "llama, inductor": ("llama", 2, {}),
    "deepseek": ("deepseek", 2, EAGER),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", CASES)
def test_losses(ranks: Callable[..., list[Any]], name: str) -> None:
    kind, p, options = CASES[name]
    [expected] = ranks(1, stepped, kind, None, options, timeout=LONG)
    for found in ranks(p, stepped, kind, {"cp_size": 2}, options, timeout=LONG):
        check_alike(found, expected)
        assert found["sites"] and not found["refused"]
