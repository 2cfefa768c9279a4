"""Whatever a program sets TF32 by, it is read off without an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = """
import torch
from ringopt.hardware.precision import rounds_float32
from ringopt.runtime.verify import ambient
assert not rounds_float32("cuda") and not rounds_float32("cpu")
{setting}
print(rounds_float32("cuda"), rounds_float32("cpu"), ambient([torch.ones(1)]) == set())
"""


@pytest.mark.parametrize(
    "setting, expected",
    [
        ('torch.set_float32_matmul_precision("high")', "True True False"),
        ('torch.set_float32_matmul_precision("medium")', "True True False"),
        ("torch.backends.cuda.matmul.allow_tf32 = True", "True False True"),
        ('torch.backends.cuda.matmul.fp32_precision = "tf32"', "True False True"),
        ('torch.backends.fp32_precision = "tf32"', "True True False"),
    ],
)
def test_settings(setting: str, expected: str) -> None:
    """Each in a process of its own: torch keeps apart which of its two ways was used."""
    done = subprocess.run([sys.executable, "-c", SAYS.format(setting=setting)], capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr
