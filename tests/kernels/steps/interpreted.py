"""Recurrences whose steps are one launch, as Triton's interpreter runs them, against operator by operator: a process of
its own, for Triton decides when it is imported who runs what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringopt.kernels.steps import one_launch
from ringopt.scans import in_place
from ringopt.scans.in_place import StepRoles, kinds_in, repeated_step

COUNT, SHAPE = 5, (2, 3, 7)
Step = Callable[..., Any]

# (carry..., row..., const) -> carries, a row, a sum; the rows are as wide as the state, or less.
STEPS: dict[str, tuple[int, list[tuple[int, ...]], Step]] = {
    "decays": (1, [SHAPE, (3, 1)], lambda s, x, g, w: (s * g + x, s * w, s * x)),
    "gates": (1, [SHAPE, SHAPE], lambda s, x, g, w: ((n := s * g.sigmoid() + x.tanh() * w), n.square(), n * 0.5)),
    "a running maximum": (2, [SHAPE], lambda m, s, x, w: ((n := torch.maximum(m + w, x)), s * (m + w - n).exp(), n, s)),
    "places that change": (2, [SHAPE], lambda a, b, x, w: (b, a * 0.5 + x, a, b)),
    "chosen": (1, [SHAPE], lambda s, x, w: (torch.where(x > 0, s * 0.5, x).masked_fill(x > 1, 0.25), s - x, -x)),
}  # fmt: skip


def cases(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor], list[Tensor], Any, StepRoles, bool]]:
    for name, (carries, rows, step) in STEPS.items():
        torch.manual_seed(0)
        inputs = [*(torch.randn(SHAPE) for _ in range(carries)), *(torch.randn(COUNT, *size) for size in rows)]
        inputs = [x.to(dtype) for x in (*inputs, torch.randn(SHAPE[1:]) * 0.3)]
        for keeps in (False, True):
            of_inputs = (*["carry"] * carries, *["row"] * len(rows), "const")
            roles = StepRoles(of_inputs, (*["carry"] * carries, "row", "sum"), keeps)
            for backwards in (False, True):
                results = [torch.zeros(COUNT + 1, *SHAPE, dtype=dtype) for _ in range(carries)]
                for kept, x in zip(results, inputs, strict=False):
                    kept[-1 if backwards else 0] = x
                results += [torch.zeros(COUNT, *SHAPE, dtype=dtype), torch.ones(SHAPE)]
                yield name, inputs, results, repeated_step(step, kinds_in(inputs, roles), roles), roles, backwards


def main() -> None:
    launches = list[str]()
    run = in_place.run_steps
    one_launch.usable = lambda x: x.dtype != torch.float64  # type: ignore[assignment]
    in_place.run_steps = lambda *given, **named: (launches.append("one"), run(*given, **named))[1]  # type: ignore
    tried = 0
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
        for name, inputs, results, step, roles, backwards in cases(dtype):
            assert step.program, name
            right, found = ([x.clone() for x in results] for _ in range(2))
            wanted = replace(step, program="").run(inputs, right, backwards)
            last = step.run(inputs, found, backwards)
            tried += 1
            pairs = [*zip(wanted, last, strict=True), *zip(right, found, strict=True)]
            carries = len(last)
            for at, (one, other) in enumerate(pairs):
                if carries <= at < 2 * carries and not roles.keeps:
                    continue  # a carry that is not kept goes anywhere
                torch.testing.assert_close(other, one, rtol=close, atol=close, msg=name)
    assert len(launches) == tried
    print(f"{tried} right")


if __name__ == "__main__":
    sys.exit(main())
