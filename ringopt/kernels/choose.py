"""Which kernel computes the tiles of a site, and why."""

from __future__ import annotations

import torch

from ringopt.errors import OptionError
from ringopt.kernels.base import Kernel
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.kernels.math import Math

# Fastest first; "auto" takes the first that supports the case.
KERNELS: tuple[Kernel, ...] = (CpuFlash(), Math())


def choose(name: str, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> tuple[Kernel, str]:
    """The kernel for heads of `key_dim` and `value_dim`, and the reason as a sentence.

    Raises OptionError when the kernel called for by `name` cannot do it, or, for "auto", when none can.
    """
    if device.type == "meta":  # a dry run of a model that would run here
        device = torch.device("cpu")
    refusals: list[str] = []
    for kernel in KERNELS:
        if name not in ("auto", kernel.name):
            continue
        refusal = kernel.supports(dtype, device, key_dim, value_dim)
        if refusal is None:
            reasons = [*refusals, "asked for" if name != "auto" else "the fastest that supports this case"]
            return kernel, f"kernel {kernel.name}: " + "; ".join(reasons)
        refusals.append(refusal.sentence)
    if not refusals:
        raise OptionError(f"option kernel={name!r}: expected one of {['auto', *(kernel.name for kernel in KERNELS)]}")
    raise OptionError(f"option kernel={name!r}: " + "; ".join(refusals))
