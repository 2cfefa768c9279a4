"""All steps of a recurrence in one launch, where each element is computed by itself; others say why they are not."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ringopt.ir.refusal import Refusal
from ringopt.kernels.steps.base import OneStep
from ringopt.kernels.steps.by_element import ElementKernel
from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.fx import make_fx

TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def program_of(step, *sizes: tuple[int, ...]) -> str | Refusal:
    """Of (carry, row, const) -> carry."""
    with FakeTensorMode():
        graph = make_fx(lambda *given: [step(*given)], tracing_mode="real")(*map(torch.empty, sizes)).graph
    found = ElementKernel.of(OneStep(graph, ("carry", "row", "const"), ("carry",), keeps=True))
    return found if isinstance(found, Refusal) else found.program


def test_what_is_written() -> None:
    program = program_of(lambda s, x, w: s * w + x, (2, 3), (3,), (2, 1))
    assert isinstance(program, str)
    assert program.partition("def steps")[2].partition("):\n")[2] == """\
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < total
    rest = at
    i1 = rest % sizes[1]
    rest = rest // sizes[1]
    i0 = rest % sizes[0]
    rest = rest // sizes[0]
    s0 = tl.cast(tl.load(carries[0] + at, mask=there, other=0), tl.float32)
    k0 = tl.cast(tl.load(consts[0] + (i0 * at_consts[0][0] + i1 * at_consts[0][1]), mask=there, other=0), tl.float32)
    for n in range(count):
        t = tl.cast(first + n * order, tl.int64)
        r0 = tl.cast(tl.load(rows[0] + (t * at_rows[0][0] + i0 * at_rows[0][1] + i1 * at_rows[0][2]), mask=there, other=0), tl.float32)
        x0 = tl.cast(s0 * k0, tl.float32)
        x1 = tl.cast(x0 + r0, tl.float32)
        tl.store(into[0] + (t + (order + 1) // 2) * total + at, x1, mask=there)
        ns0 = x1
        s0 = ns0
    tl.store(last[0] + at, s0, mask=there)
"""  # noqa: E501


@pytest.mark.parametrize(
    "step, sentence",
    [
        (lambda s, x, w: s @ w + x, "mm has no form in Triton for an element by itself"),
        (lambda s, x, w: s - s.mean(-1, keepdim=True) + x, "mean has no form in Triton for an element by itself"),
        (lambda s, x, w: s + x.sort(-1)[0], "sort gives several values"),
        (lambda s, x, w: s.mT + x, "transpose has no form in Triton for an element by itself"),
        (lambda s, x, w: s.reshape(9).view(3, 3) + x, "view is [9], and the state [3, 3]"),
        (lambda s, x, w: s.unsqueeze(1).expand(3, 3, 3)[0] + x, "and the state [3, 3]"),
        (lambda s, x, w: s.double().float() + x, "torch.float64 has no form in Triton"),
        (lambda s, x, w: s.add(x, alpha=2), "add has no form in Triton for an element by itself"),
        (lambda s, x, w: (s + x)[:1], "it gives [1, 3] beside a state of [3, 3]"),
    ],
)
def test_what_is_not(step, sentence: str) -> None:
    found = program_of(step, (3, 3), (3, 3), (3, 3))
    assert isinstance(found, Refusal) and found.sentence.endswith(sentence)


@TRITON
def test_it_compiles_for_an_h100() -> None:
    from ringopt.kernels.score_program import function_of
    from tests.kernels.test_triton_merge import compiled

    program = program_of(lambda s, x, w: (s * w.sigmoid() + x.tanh()).relu(), (2, 3), (3,), (2, 1))
    assert isinstance(program, str)
    one, sizes = ("*fp32",), ("i32", "i32")
    arguments = {
        **dict.fromkeys(("carries", "consts", "into", "last"), one),
        **{"rows": ("*bf16",), "count": "i32", "first": "i32", "order": "i32", "total": "i32", "sizes": sizes},
        **{"at_rows": (("i32", *sizes),), "at_consts": (sizes,)},
    }
    kernel = compiled(function_of(program, "steps"), arguments, {"BLOCK": 256})
    assert "st.local" not in kernel.asm["ptx"]
