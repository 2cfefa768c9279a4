"""All steps of a recurrence in one launch: which form a step has, the numbers, and what is said where a GPU cannot."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from ringopt.kernels.steps import one_launch
from ringopt.kernels.steps.base import OneStep
from ringopt.kernels.steps.by_element import ElementKernel
from ringopt.kernels.steps.by_matrix import MatrixKernel
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_numbers() -> None:
    """Forwards and backwards, kept or not, rows of fewer sizes, 32 and 16 bits, under Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.kernels.steps.interpreted"], env=environment, capture_output=True, text=True
    )
    assert found.stdout == "68 right: 40 by element, 28 by matrix\n", found.stdout + found.stderr


@pytest.mark.parametrize(
    "step, kind",
    [
        (lambda s, x: s * 0.5 + x, ElementKernel),
        (lambda s, x: s @ x, MatrixKernel),
        (lambda s, x: torch.linalg.inv(s) + x, type(None)),
    ],
)
def test_the_first_form_that_a_step_has_is_taken(step, kind: type) -> None:
    with FakeTensorMode():
        graph = make_fx(lambda *given: [step(*given)], tracing_mode="real")(torch.empty(3, 3), torch.empty(3, 3)).graph
    assert type(one_launch.step_kernel(OneStep(graph, ("carry", "row"), ("carry",), keeps=True))) is kind


class Small:
    """A kernel for which there is no room."""

    def run(self, *given: object, **named: object) -> None:
        return None


def test_a_gpu_without_room_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_launch, "usable", lambda x: True)
    monkeypatch.setattr(one_launch, "works", lambda device: True)
    one_launch.say_that_it_is_small.cache_clear()
    given: list[list[Tensor]] = [[torch.empty(2, 2)], [torch.empty(4, 2, 2)], [], []]
    with pytest.warns(UserWarning, match="too little shared memory for all steps of a recurrence") as told:
        found = [one_launch.run_steps(Small(), *given, False) for _ in range(2)]
    assert found == [None, None] and len(told) == 1


def test_kernels_with_wrong_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    form = one_launch.StepForm("of nothing", lambda step: Small(), lambda s, x, w: s + x, ((2,), (2,), (2,)))
    monkeypatch.setattr(one_launch, "FORMS", (form,))
    one_launch.works.cache_clear()
    sentence = "do not work on cpu, and are not used: the numbers of those of nothing are wrong"
    with pytest.warns(UserWarning, match=sentence):
        assert not one_launch.works(torch.device("cpu"))
    one_launch.works.cache_clear()
