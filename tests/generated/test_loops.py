"""Generated loops: none that is no recurrence affine in its state becomes a scan, and what becomes one has the numbers
of the loop on any number of ranks. Programs without loops have no scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ringopt.scans import affine, linear_part
from tests.generated.drawing import Program
from tests.generated.drawing import draw as draw_without_loops
from tests.generated.finds import verdict
from tests.generated.loops import draw
from tests.generated.test_programs import check


def tens(count: int) -> list[Any]:
    """Where they begin; with -m zoo those behind the first."""
    return [pytest.param(first, marks=[pytest.mark.zoo] if first else []) for first in range(0, count, 10)]


@pytest.mark.parametrize("first", tens(1000))
def test_a_thousand_loops(first: int) -> None:
    count = 10 if first else 4  # in the normal run
    found = check(first, count, most=2, draw=draw)
    assert found["exact"] > count // 3, found


@pytest.mark.parametrize("hundred", [pytest.param(at, marks=[pytest.mark.zoo] if at else []) for at in range(100)])
def test_none_of_ten_thousand_programs_has_a_scan_that_is_none(hundred: int) -> None:
    """A tenth of them have loops."""
    loops, others = (10, 90) if hundred else (3, 8)  # in the normal run
    found = {"loops": verdicts(draw, hundred, loops), "no loops": verdicts(draw_without_loops, hundred, others)}
    assert found["loops"]["scan"] > loops // 2 and not found["no loops"]["scan"], found


def verdicts(draw: Callable[[int, int], Program], hundred: int, count: int) -> Counter[str]:
    """Of so many valid programs."""
    found = Counter[str]()
    for seed in range(1000 * hundred, 1000 * hundred + 1000):
        said = verdict(program := draw(seed, 2))
        assert not said.startswith(("wrong", "crash")), f"seed {seed}: {said}\n{program}"
        found[said] += said != "invalid"
        if found.total() == count:
            break
    return found


PLANTED = {"S = (S + u).tanh()": "tanh", "S = S.abs() * 0.5 + u": "abs", "S = F.relu(S) + u": "relu"}


@pytest.mark.sample(3)
@pytest.mark.parametrize("step", PLANTED)
def test_a_proof_that_says_yes_is_noticed(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = f"S = x[:, 0]; outs = []\nfor i in range(x.shape[1]):\n    u = x[:, i]; {step}; outs.append(S)\n"
    program = Program((f"{loop}x = torch.stack(outs, 1)",), ("logits.sum()", "loss,"), batch=3)
    assert verdict(program) == "scan"  # for its columns know nothing of each other
    monkeypatch.setitem(linear_part.LINEAR, PLANTED[step], linear_part.LINEAR["neg"])
    affine._prove.cache_clear()
    assert verdict(program).startswith("wrong: carry 0 is not linear")
    affine._prove.cache_clear()
