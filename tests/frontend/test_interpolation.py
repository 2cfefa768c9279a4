"""Interpolation to the size that there is gives what eager gives on a CPU: a copy, and the gradient of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
import torch.nn.functional as F

from ringopt.frontend.interpolation import copy_where_sizes_stay

SIZE, FACTOR = 8, 1.0125  # 8.1 rows, of which 8 are whole

MODES = [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("nearest", 2)]
OTHERS = [("nearest", 1), ("nearest", 3), ("nearest-exact", 2), ("bicubic", 2), ("area", 2)]


def given(dims: int) -> torch.Tensor:
    torch.manual_seed(dims)
    return torch.randn(2, 3, *[SIZE] * dims, dtype=torch.float64, requires_grad=True)


def calls(gm: fx.GraphModule) -> list[Any]:
    copy_where_sizes_stay(gm)
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def traced(program: Any, x: torch.Tensor) -> list[Any]:
    seen = list[Any]()

    def backend(gm: fx.GraphModule, _inputs: Any) -> Any:
        seen.extend(calls(gm))
        return gm

    torch._dynamo.reset()
    found = torch.compile(program, backend=backend)(x)
    torch.testing.assert_close(found, program(x), rtol=0, atol=0)
    assert found.stride() == program(x).stride()
    return seen


@pytest.mark.parametrize("mode, dims", MODES)
@pytest.mark.parametrize("last", [False, True])
def test_a_copy_stands_for_what_copies(mode: str, dims: int, last: bool) -> None:
    x = given(dims)
    x = x.contiguous(memory_format=torch.channels_last) if last and dims == 2 else x
    assert traced(lambda x: F.interpolate(x, scale_factor=FACTOR, mode=mode), x) == [torch.clone]
    assert traced(nn.Upsample(size=[SIZE] * dims, mode=mode), x) == [torch.clone]


@pytest.mark.parametrize("mode, dims", [*OTHERS, *((mode, dims) for mode, dims in MODES if mode != "nearest")])
def test_what_moves_rows_stays(mode: str, dims: int) -> None:
    """Of modes that a CPU copies, where a size changes."""
    factors = [FACTOR] * (dims - 1) + [FACTOR if (mode, dims) in OTHERS else 2.0]
    assert traced(lambda x: F.interpolate(x, None, factors, mode), given(dims)) == [F.interpolate]


def test_what_smooths_stays() -> None:
    assert traced(lambda x: F.interpolate(x, scale_factor=FACTOR, mode="bilinear", antialias=True), given(2)) == [
        F.interpolate
    ]


@pytest.mark.parametrize("mode, dims", MODES)
def test_numbers_and_gradients_are_those_of_eager(mode: str, dims: int) -> None:
    """Inductor's, and AOTAutograd's, of the program as written are others."""
    torch._dynamo.reset()
    program = lambda x: F.interpolate(x * 2, scale_factor=FACTOR, mode=mode).square().sum()  # noqa: E731
    x, y = given(dims), given(dims)
    compiled = torch.compile(program, backend="ring", options={"inner_backend": "aot_eager"})
    torch.testing.assert_close(compiled(x), program(y), rtol=0, atol=1e-12)
    compiled(x).backward()
    program(y).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-12)
