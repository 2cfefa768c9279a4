"""Triton's interpreter, as kernels of Liger's need it: numbers that are given to a kernel have a dtype, and functions
of libdevice, which the interpreter has not, are computed."""

from __future__ import annotations

from typing import Any

import numpy as np


def as_kernels_need_it() -> None:
    """In this process, where TRITON_INTERPRET is set and no kernel is loaded yet."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(x: Any) -> Any:
        if isinstance(x, float):
            return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)
        return convert(x)

    interpreter._implicit_cvt = converted
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
    libdevice.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)
