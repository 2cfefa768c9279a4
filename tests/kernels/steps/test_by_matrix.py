"""All steps of a recurrence in one launch, where a step multiplies its state by matrices; others say why not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.steps.base import OneStep
from ringopt.kernels.steps.by_matrix import MatrixKernel
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx

TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def kernel_of(step: Callable[..., Any], *sizes: Sequence[int], carries: int = 1) -> MatrixKernel | Refusal:
    """Of (carry, ..., row, ...) -> carry, ..."""

    def listed(*given: Tensor) -> list[Tensor]:
        found = step(*given)
        return list(found) if isinstance(found, tuple) else [found]

    with FakeTensorMode():
        graph = make_fx(listed, tracing_mode="real")(*map(torch.empty, sizes)).graph
    rows = len(sizes) - carries
    return MatrixKernel.of(OneStep(graph, (*["carry"] * carries, *["row"] * rows), ("carry",) * carries, keeps=True))


def delta_rule(s, w, v, k):
    return s + k.mT @ (v - w @ s)


def test_what_is_written() -> None:
    """A program has 32 of the 40 columns, then 8; a chunk of 24 steps is a tile of 32, and 0 where nothing is."""
    kernel = kernel_of(delta_rule, (2, 1, 16, 40), (2, 1, 24, 16), (2, 1, 24, 40), (2, 1, 24, 16))
    assert isinstance(kernel, MatrixKernel) and kernel.grid == (2, 2)
    written = kernel.program.partition("def steps")[2].partition("):\n")[2]
    assert written == """\
    batch = tl.program_id(0).to(tl.int64)
    rest = batch
    i0 = rest % 2
    rest = rest // 2
    part = tl.program_id(1) * 32 + tl.arange(0, 32)
    s0 = tl.cast(tl.load(carries[0] + (i0 * 640 + tl.arange(0, 16)[:, None] * 40 + part[None, :]), mask=(part[None, :] < 40), other=0), tl.float32)
    for n in range(count):
        t = tl.cast(first + n * order, tl.int64)
        r2_1 = tl.cast(tl.load(rows[2] + (t * at_rows[2][0] + i0 * at_rows[2][1] + tl.arange(0, 32)[None, :] * at_rows[2][3] + tl.arange(0, 16)[:, None] * at_rows[2][4]), mask=(tl.arange(0, 32)[None, :] < 24), other=0), tl.float32)
        r1_5 = tl.cast(tl.load(rows[1] + (t * at_rows[1][0] + i0 * at_rows[1][1] + tl.arange(0, 32)[:, None] * at_rows[1][3] + part[None, :] * at_rows[1][4]), mask=(tl.arange(0, 32)[:, None] < 24) & (part[None, :] < 40), other=0), tl.float32)
        r0_6 = tl.cast(tl.load(rows[0] + (t * at_rows[0][0] + i0 * at_rows[0][1] + tl.arange(0, 32)[:, None] * at_rows[0][3] + tl.arange(0, 16)[None, :] * at_rows[0][4]), mask=(tl.arange(0, 32)[:, None] < 24), other=0), tl.float32)
        x11 = tl.cast(tl.dot(r0_6, s0, input_precision=PRECISION), tl.float32)
        x13 = tl.cast(r1_5 - x11, tl.float32)
        x16 = tl.cast(tl.dot(r2_1, tl.where((tl.arange(0, 32)[:, None] < 24), x13, 0.0), input_precision=PRECISION), tl.float32)
        x18 = tl.cast(s0 + x16, tl.float32)
        tl.store(into[0] + (t + (order + 1) // 2) * 1280 + (i0 * 640 + tl.arange(0, 16)[:, None] * 40 + part[None, :]), x18, mask=(part[None, :] < 40))
        ns0 = x18
        s0 = ns0
    tl.store(last[0] + (i0 * 640 + tl.arange(0, 16)[:, None] * 40 + part[None, :]), s0, mask=(part[None, :] < 40))
"""  # noqa: E501


@pytest.mark.parametrize(
    "step, sizes, grid",
    [
        (lambda s, x: s @ x, [(3, 70, 16), (3, 16, 16)], (3, 3)),  # rows of the state
        (lambda s, x: x @ s @ x, [(3, 70, 70), (3, 70, 70)], (3, 1)),  # each needs all: a whole matrix
        (lambda s, x: x @ s, [(70, 16), (70, 70)], (1, 1)),
        (lambda s, x: s @ x, [(3, 1, 16), (16, 16)], (3, 1)),  # all matrices, of one row each, by the same one
    ],
)
def test_what_a_program_has(step, sizes: list[tuple[int, ...]], grid: tuple[int, int]) -> None:
    kernel = kernel_of(step, *sizes)
    assert isinstance(kernel, MatrixKernel) and kernel.grid == grid


@pytest.mark.parametrize(
    "step, sizes, sentence",
    [
        (lambda s, x: (s @ x).cumsum(-1), [(3, 3), (3, 3)], "cumsum has no form in Triton for an element by itself"),
        (lambda s, x: s + x.reshape(2, 3, 4), [(2, 3, 4), (3, 2, 4)], "moves elements between matrices"),
        (lambda s, x: s.reshape(2, 4, 3).mT + x, [(2, 3, 4), (1, 1, 1)], "moves elements between matrices"),
        (lambda s, x: x @ s, [(200, 200), (200, 200)], "arg1_1 of [200, 200] is too large for one tile"),
        (
            lambda s, x: s * s.sum((-2, -1), keepdim=True) + x,
            [(3, 3), (3, 3)],
            "a sum over several dims has no form for a tile",
        ),
        (lambda s, x: s + x, [(3,), (3,)], "a state of [3] has no matrices"),
        (lambda s, x: x @ s.double().float(), [(3, 3), (3, 3)], "torch.float64 has no form in Triton"),
        (lambda s, x: x @ s * s.max(-1, True)[0], [(3, 3), (3, 3)], "no form in Triton for an element by itself"),
        (lambda s, x: s.mT, [(3, 4), (3, 4)], "what it carries changes its shape"),
    ],
)
def test_what_is_not(step, sizes: list[tuple[int, ...]], sentence: str) -> None:
    found = kernel_of(step, *sizes)
    assert isinstance(found, Refusal) and found.sentence.endswith(sentence)


def test_carries_that_the_matrices_do_not_read() -> None:
    found = kernel_of(lambda s, n, x: (x @ s, n + 1), (3, 3), (3, 3), (3, 3), carries=2)
    assert isinstance(found, Refusal) and found.sentence == "it carries something that the rest does not read"


@TRITON
@pytest.mark.parametrize("precision, product", [("tf32", "wgmma.mma"), ("ieee", "fma.rn.f32")])
def test_it_compiles_for_an_h100(precision: str, product: str) -> None:
    """A gated delta rule of 128 x 128 in chunks of 64: on tensor cores where a program allows TF32, in registers, and
    two steps' rows in the shared memory of one program."""
    from ringopt.kernels.score_program import function_of
    from tests.kernels.test_triton_merge import compiled

    kernel = kernel_of(
        lambda s, w, v, k, g: s * g + k.mT @ (v - w @ s),
        *[(1, 8, 128, 128), (1, 8, 64, 128), (1, 8, 64, 128), (1, 8, 64, 128), (1, 8, 1, 1)],
    )
    assert isinstance(kernel, MatrixKernel) and kernel.grid == (8, 4)
    arguments = {
        **dict.fromkeys(("carries", "into", "last"), ("*fp32",)),
        **{"rows": ("*fp32",) * 4, "consts": (), "count": "i32", "first": "i32", "order": "i32"},
        **{"at_rows": (("i32",) * 5,) * 4, "at_consts": ()},
    }
    found = compiled(function_of(kernel.program, "steps"), arguments, {"PRECISION": precision})
    assert product in found.asm["ptx"] and "st.local" not in found.asm["ptx"]
    assert found.metadata.shared < 227 * 1024
