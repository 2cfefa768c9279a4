"""torchtitan's compilation of each block, with options from `ringopt.defaults`: losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="pip install torchtitan")

from tests.integrations.titan_trainings import stepped
from tests.integrations.trainings import EAGER, LONG, check_alike

CP: dict[str, Any] = {"cp_size": 2}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", 2, CP, EAGER),
    "llama, FSDP2 beside it": ("llama", 4, CP, EAGER),
    "llama, inductor": ("llama", 2, CP, {}),
    "llama, tensor parallel": ("llama", 4, {**CP, "tp_size": 2, "sp": False}, EAGER),
    "llama, tensor and sequence parallel": ("llama", 4, {**CP, "tp_size": 2}, EAGER),
    "llama, FSDP2 and tensor parallel": ("llama", 8, {**CP, "tp_size": 2, "sp": False}, EAGER),
    "deepseek": ("deepseek", 2, CP, EAGER),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", CASES)
def test_losses(ranks: Callable[..., list[Any]], name: str) -> None:
    kind, p, mesh, options = CASES[name]
    [expected] = ranks(1, stepped, kind, None, options, timeout=LONG)
    for found in ranks(p, stepped, kind, mesh, options, timeout=LONG):
        check_alike(found, expected)
        assert found["sites"] and not found["refused"]
