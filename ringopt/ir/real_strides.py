"""Fake values with the strides of the real ones.

Torch's fake kernels of a few operators keep the order of the operand's dims where the CPU kernels do not (torch 2.13).
Eager and torch.compile(backend="aot_eager") return the strides of the kernels, and so does ringopt: views of an output,
and other graphs that read it, see the same strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.operators import KERNEL_ORDERED_NORMS
from ringopt.torch_compat.tensors import suggest_memory_format

aten = torch.ops.aten

# By operator, the memory format of the first result on the CPU.
FORMATS: dict[Any, Callable[[Tensor], torch.memory_format]] = {
    **dict.fromkeys(KERNEL_ORDERED_NORMS, suggest_memory_format),
    aten.log_sigmoid_forward.default: lambda x: torch.contiguous_format,
}


class RealStrides(FakeTensorMode):
    """torch's FakeTensorMode, with the strides of the CPU kernels."""

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found: Any = super().dispatch(func, types, args, kwargs or {})
        if func not in FORMATS or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
            return found
        first, *others = found
        with self:
            return (torch.empty_like(first, memory_format=FORMATS[func](args[0])), *others)
