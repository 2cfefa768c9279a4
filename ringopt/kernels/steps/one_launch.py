"""All steps of a recurrence in one launch, where Triton is at hand on a GPU and a step has a form for it: element by
element (by_element.py) or with products (by_matrix.py). What takes the rest runs it operator by operator, as many
launches a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.fused import usable
from ringopt.kernels.steps.base import OneStep, StepKernel, Tensors
from ringopt.kernels.steps.by_element import ElementKernel
from ringopt.kernels.steps.by_matrix import MatrixKernel
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx


@dataclass(frozen=True)
class StepForm:
    """A kind of kernel: `of` makes one of a step. It is tried with `step`, of a carry, a row and a const of `sizes`."""

    name: str
    of: Callable[[OneStep], StepKernel | Refusal]
    step: Callable[[Tensor, Tensor, Tensor], Tensor]
    sizes: tuple[tuple[int, ...], ...]

    def right(self, device: torch.device) -> bool:
        """Whether the kernel gives the numbers of a loop here."""
        with FakeTensorMode():
            given = map(torch.empty, self.sizes)
            graph = make_fx(lambda *given: [self.step(*given)], tracing_mode="real")(*given).graph
        kernel = self.of(OneStep(graph, ("carry", "row", "const"), ("carry",), keeps=True))
        assert not isinstance(kernel, Refusal), kernel.sentence
        made = torch.Generator(device).manual_seed(0)
        state, row, weight = (torch.randn(size, device=device, generator=made) * 0.5 for size in self.sizes)
        rows = torch.stack([row, row * 0.5, -row])
        kept, loop = torch.stack([state] * 4), [state]
        for row in rows:
            loop.append(self.step(loop[-1], row, weight))
        kernel.run([state], [rows], [weight], [kept], backwards=False)
        return torch.allclose(kept, torch.stack(loop), rtol=1e-2, atol=1e-2)  # of 10 bits, where TF32 is allowed


def delta_rule(state: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a form with products is tried with."""
    return state * 0.5 + key.bmm(value - key.mT.bmm(state)) * 0.2


# A step is run by the first of which it has the form.
FORMS = (
    StepForm("of elements", ElementKernel.of, lambda s, x, w: s * w + x, ((2, 5), (2, 5), (2, 5))),
    StepForm("of matrices", MatrixKernel.of, delta_rule, ((2, 24, 40), (2, 24, 7), (2, 7, 40))),
)


def step_kernel(step: OneStep) -> StepKernel | None:
    """What runs all of such steps in one launch, if there is such."""
    kernels = (form.of(step) for form in FORMS)
    return next((found for found in kernels if not isinstance(found, Refusal)), None)


def run_steps(
    kernel: StepKernel, carried: Tensors, rows: Tensors, consts: Tensors, into: Tensors, backwards: bool
) -> list[Tensor] | None:
    """The last carries; None where these tensors cannot be run so. `into` as `StepKernel.run` has it."""
    if not all(map(usable, (*carried, *rows, *consts, *into))) or not works(carried[0].device):
        return None
    with torch.cuda.device_of(carried[0]):
        last = kernel.run(carried, rows, consts, into, backwards)
    if last is None:
        say_that_it_is_small(carried[0].device)
    return last


@cache
def say_that_it_is_small(device: torch.device) -> None:
    """Once."""
    sentence = "has too little shared memory for all steps of a recurrence in one launch: each step takes several"
    warnings.warn(f"{device} {sentence}", stacklevel=2)


@cache
def works(device: torch.device) -> bool:
    """Whether such kernels give the numbers of a loop here: tried once. Where they do not, a warning says why."""
    try:
        wrong = [form.name for form in FORMS if not form.right(device)]
        why = f"the numbers of those {' and '.join(wrong)} are wrong" if wrong else ""
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        warnings.warn(f"kernels for recurrences do not work on {device}, and are not used: {why}", stacklevel=2)
    return not why
