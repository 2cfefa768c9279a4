"""TRL's trainers, and peft in them, log on ranks what they log on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("trl", reason="pip install trl peft")
pytest.importorskip("peft", reason="pip install trl peft")

from tests.integrations.trainings import EAGER, Training, check_ranks
from tests.integrations.trl_trainings import preferred, supervised

CASES = {
    "completions": (supervised, Training(data="completions", steps=2, options=EAGER)),
    "packing": (supervised, Training(arguments={"packing": True}, steps=2, options=EAGER)),
    "LoRA": (supervised, Training("lora", steps=2, options=EAGER)),
    "DPO": (preferred, Training(steps=2, options=EAGER)),
}


@pytest.mark.zoo
@pytest.mark.parametrize("name", CASES)
def test_losses_and_metrics(ranks: Callable[..., list[Any]], name: str) -> None:
    found, expected = check_ranks(ranks, *CASES[name])
    for step, metrics in enumerate(expected["metrics"]):
        assert found["metrics"][step] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
