"""Recurrences whose steps are one launch, as Triton's interpreter runs them, against operator by operator: a process of
its own, for Triton decides when it is imported who runs what."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from ringopt.kernels.steps import one_launch
from ringopt.scans import in_place
from ringopt.scans.in_place import StepRoles, kinds_in, repeated_step
from tests.harness.triton_interpreter import with_bounds

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

# The same of matrices, whose results are what they carry: the sizes of carries, rows and a const.
Sizes = list[tuple[int, ...]]
HEADS, K, V, CHUNK = (2, 3), 20, 37, 5


def delta_rule(s, k, v, b, w):
    """Token by token, as it is written by hand."""
    k = k * 0.2
    seen = (s * k.unsqueeze(-1)).sum(-2)
    return s * w.sigmoid() + k.unsqueeze(-1) * ((v - seen) * b.unsqueeze(-1)).unsqueeze(-2)


MATRICES: dict[str, tuple[Sizes, Sizes, tuple[int, ...], Step]] = {
    "gated delta rule": (
        [(*HEADS, K, V)], [(*HEADS, CHUNK, K), (*HEADS, CHUNK, V), (*HEADS, 1, 1)], (*HEADS, CHUNK, K),
        lambda s, a, v, g, b: s * g.exp() + (b * 0.2).mT @ (v - (a * 0.2) @ s),
    ),
    "transposed": (
        [(*HEADS, V, K)], [(*HEADS, CHUNK, K), (*HEADS, CHUNK, V)], (K,),
        lambda s, a, v, g: s * g.sigmoid() + ((v - (a * 0.3).sigmoid() @ s.mT * 0.2).mT @ a) * 0.1,
    ),
    "token by token": ([(*HEADS, K, V)], [(*HEADS, K), (*HEADS, V), HEADS], (K, 1), delta_rule),
    "from the right": ([(9, K)], [(9, K)], (K, K), lambda s, x, w: torch.mm(s.exp(), w * 0.1).tanh() + x),
    "a row a matrix": ([(3, 1, K)], [(3, 1, K)], (K, K), lambda s, x, w: (s @ (w * 0.1)).tanh() + x),
    "from both sides": ([(2, 6, 6)], [(2, 6, 6)], (2, 6, 6), lambda s, x, w: x.bmm(s).bmm(w) * 0.1 + s.mT),
    "vectors beside": (
        [(*HEADS, K, V), (*HEADS, K)], [(*HEADS, K), (*HEADS, V)], (),
        lambda s, n, k, v, w: (s * w + (m := n * 0.5 + k).unsqueeze(-1) * v.unsqueeze(-2) * n.unsqueeze(-1), m),
    ),
}  # fmt: skip


def cases_of_matrices(dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor], list[Tensor], Any, StepRoles, bool]]:
    for name, (carries, rows, const, step) in MATRICES.items():
        torch.manual_seed(0)
        inputs = [*map(torch.randn, carries), *(torch.randn(COUNT, *size) for size in rows), torch.randn(const)]
        inputs = [x.to(dtype) for x in inputs]
        inputs[-2] = inputs[-2].transpose(0, -1).contiguous().transpose(0, -1)  # in any memory
        for backwards in (False, True):
            of_inputs = (*["carry"] * len(carries), *["row"] * len(rows), "const")
            roles = StepRoles(of_inputs, ("carry",) * len(carries), keeps=True)
            results = [torch.zeros(COUNT + 1, *size, dtype=dtype) for size in carries]
            for kept, x in zip(results, inputs, strict=False):
                kept[-1 if backwards else 0] = x

            def listed(*given, step=step):
                found = step(*given)
                return found if isinstance(found, tuple) else (found,)

            yield name, inputs, results, repeated_step(listed, kinds_in(inputs, roles), roles), roles, backwards


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
    launches, run = list[str](), in_place.run_steps

    def counted(kernel, *given, **named):
        last = run(kernel, *given, **named)
        assert last is not None
        launches.append(type(kernel).__name__)
        return last

    interpreter._patch_lang_tensor = with_bounds(interpreter._patch_lang_tensor)
    in_place.run_steps = counted  # type: ignore[assignment]
    one_launch.usable = lambda x: x.dtype != torch.float64  # type: ignore[assignment]
    one_launch.works = lambda device: True  # type: ignore[assignment]
    tried = 0
    for dtype, close in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
        for name, inputs, results, step, roles, backwards in (*cases(dtype), *cases_of_matrices(dtype)):
            assert step.kernel is not None, name
            right, found = ([x.clone() for x in results] for _ in range(2))
            wanted = replace(step, kernel=None).run(inputs, right, backwards)
            last = step.run(inputs, found, backwards)
            tried += 1
            pairs = [*zip(wanted, last, strict=True), *zip(right, found, strict=True)]
            carries = len(last)
            explained = partial("{}: {}".format, name)
            for at, (one, other) in enumerate(pairs):
                if carries <= at < 2 * carries and not roles.keeps:
                    continue  # a carry that is not kept goes anywhere
                torch.testing.assert_close(other, one, rtol=close, atol=close, msg=explained)
    assert len(launches) == tried
    print(f"{tried} right: {launches.count('ElementKernel')} by element, {launches.count('MatrixKernel')} by matrix")


if __name__ == "__main__":
    sys.exit(main())
