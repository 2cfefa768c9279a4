"""All steps of a recurrence in one launch, where Triton is at hand on a GPU and a step computes each element by itself
(by_element.py, triton_steps.py). What takes the rest runs it operator by operator, as many launches a step."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ringopt.kernels.fused import usable
from ringopt.kernels.steps.by_element import ElementStep, steps_program
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx

Tensors = Sequence[Tensor]


def in_one_launch(tensors: Tensors) -> bool:
    """Whether steps on these, results among them, are run so."""
    return all(map(usable, tensors)) and works(tensors[0].device)


def run_steps(
    program: str, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
) -> list[Tensor]:
    """The last carries. `into` has a result for each output of the step, which is filled: stacked where it is a row."""
    from ringopt.kernels.steps.triton_steps import run

    with torch.cuda.device_of(carried[0]):
        return run(program, carried, rows, consts, into, backwards)


@cache
def works(device: torch.device) -> bool:
    """Whether such a kernel gives the numbers of a loop here: tried once. Where it does not, a warning says why."""
    steps = 3
    try:
        with FakeTensorMode():
            traced = make_fx(lambda s, x, w: [s * w + x], tracing_mode="real")
            graph = traced(*(torch.empty(2, 5) for _ in range(3))).graph
        program = steps_program(ElementStep(graph, ("carry", "row", "const"), ("carry",), keeps=True))
        assert isinstance(program, str), program
        made = torch.Generator(device).manual_seed(0)
        state, weight, *rows = (torch.randn(2, 5, device=device, generator=made) for _ in range(2 + steps))
        kept, right = torch.stack([state] * (steps + 1)), [state]
        for row in rows:
            right.append(right[-1] * weight + row)
        run_steps(program, [state], [torch.stack(rows)], [weight], [kept], backwards=False)
        worked, why = torch.allclose(kept, torch.stack(right), rtol=1e-4, atol=1e-4), "its numbers are wrong"
    except Exception as error:
        worked, why = False, f"{type(error).__name__}: {error}"
    if not worked:
        warnings.warn(f"a kernel for recurrences does not work on {device}, and is not used: {why}", stacklevel=2)
    return worked
