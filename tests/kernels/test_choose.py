"""Which kernel, and the sentences of those that cannot."""

from __future__ import annotations

import pytest
import torch

from ringopt.errors import OptionError
from ringopt.kernels.choose import choose_kernel

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "device", "dims", "chosen", "reason"),
    [
        ("auto", torch.float32, "cpu", (64, 64), "flash_cpu", "kernel flash_cpu: the fastest that supports this case"),
        ("auto", torch.bfloat16, "meta", (64, 64), "flash_cpu", "the fastest"),
        ("math", torch.float32, "cpu", (64, 64), "math", "kernel math: asked for"),
        ("auto", torch.float32, "cpu", (64, 32), "math", "needs values as wide as keys; found 32 and 64"),
    ],
)
def test_choice(name: str, dtype: torch.dtype, device: str, dims: tuple[int, int], chosen: str, reason: str) -> None:
    kernel, said = choose_kernel(name, dtype, torch.device(device), *dims)
    assert kernel.name == chosen
    assert reason in said


@pytest.mark.parametrize(
    ("name", "dtype", "dims", "sentence"),
    [
        ("flash_cpu", torch.float32, (64, 32), "option kernel='flash_cpu': .* needs values as wide as keys"),
        ("flash_cpu", torch.int64, (8, 8), "kernel flash_cpu has no torch.int64; it has torch.float64"),
        ("auto", torch.complex64, (8, 8), "kernel math has no torch.complex64: attention is for floating point"),
        (
            "fast",
            torch.float32,
            (8, 8),
            r"option kernel='fast': expected one of \['auto', 'flash', 'cudnn', 'efficient',",
        ),
    ],
)
def test_refusals(name: str, dtype: torch.dtype, dims: tuple[int, int], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        choose_kernel(name, dtype, CPU, *dims)
