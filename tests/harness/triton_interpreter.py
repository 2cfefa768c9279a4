"""What Triton's interpreter needs to run kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def as_kernels_need_it() -> None:
    """Those of Liger, in this process, where TRITON_INTERPRET is set and no kernel is loaded yet: numbers that one is
    given have a dtype, and functions of libdevice, which the interpreter has not, are computed."""
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(x: Any) -> Any:
        if isinstance(x, float):
            return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)
        return convert(x)

    interpreter._implicit_cvt = converted
    interpreter._patch_lang_tensor = with_bounds(interpreter._patch_lang_tensor)
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
    libdevice.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)


def with_bounds(patched: Callable[..., None]) -> Callable[..., None]:
    """The interpreter's `_patch_lang_tensor`, behind which numbers that a kernel computes are bounds of loops: Triton
    3.6 has them as arrays of one element, of which NumPy makes no number since 2.4."""

    def patch(tensor: Any, *scope: Any) -> None:
        patched(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patch
