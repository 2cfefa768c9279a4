"""Every pair of ways to spread, save and shorten a training beside the sequence: works, or torch itself does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.compositions import AROUND, Case, folder_of, piped, resumed, trained

HABITS = ("checkpointing", "amp", "EMA", "fused", "foreach")
PAIRS = [Case(around, (habit,)) for around in AROUND for habit in HABITS]
PAIRS += [Case("", pair) for pair in combinations(HABITS, 2) if pair != ("fused", "foreach")]
# What torch itself does not do, and its reason.
LISTS = "torch's optimizers refuse plain tensors beside DTensors in one list"
NOT_BY_TORCH = {
    ("TP", "foreach"): LISTS, ("TP", "fused"): LISTS,
    ("TP", "EMA"): "torch's foreach operators refuse plain tensors beside DTensors in one list",
    ("TP", "checkpointing"): "AOTAutograd fails alike with inductor: a checkpoint around DTensor parameters",
    ("FSDP2", "EMA"): "torch: FSDP does not support deepcopy, of which AveragedModel is made",
}  # fmt: skip

pytestmark = pytest.mark.zoo


def check(found: dict[str, Any], expected: dict[str, Any], case: Case) -> None:
    rough = "amp" in case.habits
    assert found["loss"] == pytest.approx(expected["loss"], rel=2e-2 if rough else 1e-5)
    for name, weight in found["weights"].items():
        bounds = {"rtol": 0.0, "atol": 3e-2} if rough else {"rtol": 1e-3, "atol": 1e-4}
        torch.testing.assert_close(weight, expected["weights"][name.removeprefix("module.")], **bounds)
    assert found["sites"] and not found["refused"]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: " with ".join((case.around or "alone", *case.habits)))
def test_pair(ranks: Callable[..., list[Any]], case: Case) -> None:
    if why := NOT_BY_TORCH.get((case.around, *case.habits)):
        pytest.skip(why)
    [expected] = ranks(1, trained, case, False)
    for found in ranks(4 if case.around else 2, trained, case, True):
        check(found, expected, case)


@pytest.mark.parametrize("around", ["", "DDP", "FSDP2", "TP", "PP"])
@pytest.mark.parametrize("habit", ["", "checkpointing", "EMA", "fused"])
def test_checkpoint_goes_on_with_another_number_of_ranks(
    ranks: Callable[..., list[Any]], tmp_path: Path, around: str, habit: str
) -> None:
    case = Case(around, (habit,) if habit else ())
    if why := NOT_BY_TORCH.get((case.around, *case.habits)):
        pytest.skip(why)
    clipped = () if around not in ("TP", "PP") else ("unclipped",)
    [expected] = ranks(1, trained, Case("", (*case.habits, *clipped)), False)
    if around == "PP":
        ranks(4, piped, case, folder_of(str(tmp_path)))
    else:
        ranks(4 if around else 2, trained, case, True, folder_of(str(tmp_path)))
    plain = [*(habit for habit in case.habits if habit != "EMA"), *clipped]
    for p, ring in ((1, False), (3, True), (2, True)):
        for found in ranks(p, resumed, Case("", tuple(plain)), ring, folder_of(str(tmp_path))):
            assert found["loss"] == pytest.approx(expected["loss"][2:], rel=1e-5)


STAGES = [Case("PP", (habit,)) for habit in HABITS] + [Case("PP", inner=inner) for inner in ("aot_eager", "inductor")]


@pytest.mark.parametrize("case", STAGES, ids=lambda case: " with ".join((case.inner, *case.habits)))
def test_stages_of_a_pipeline(ranks: Callable[..., list[Any]], case: Case) -> None:
    [expected] = ranks(1, trained, Case("", ("unclipped", *case.habits)), False)
    for found in ranks(4, piped, case):
        assert found["weights"]
        check(found, expected, case)
