"""What tensors have no public name for: their storage, their version counter, their kind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_strides as elementwise_strides
from torch._prims_common import is_contiguous_for_memory_format_or_false, suggest_memory_format
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = [
    "NO_TORCH_FUNCTION",
    "TorchDispatchMode",
    "elementwise_strides",
    "is_contiguous_for_memory_format_or_false",
    "is_marked_dynamic",
    "is_traceable_wrapper_subclass",
    "make_wrapper",
    "storage_key",
    "suggest_memory_format",
    "version_of",
]

# elementwise_strides(*tensors): of the result of an elementwise operator on tensors of one shape, as TensorIterator.
# is_contiguous_for_memory_format_or_false(x, memory_format=): False where open sizes leave it unknown; adds no guard.
# suggest_memory_format(x): the format that kernels which keep one give their result.
# TorchDispatchMode: a context whose __torch_dispatch__ is called for every operator below autograd.
# is_traceable_wrapper_subclass(x): whether it is a subclass that has __tensor_flatten__, such as DTensor.

# As __torch_function__ of a subclass: functions of torch are called as for a Tensor, without a detour.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl


def storage_key(x: Tensor) -> int:
    """`_cdata` of its storage: equal for tensors, fake ones too, that share memory, while one of them is alive."""
    return int(x.untyped_storage()._cdata)


def version_of(x: Tensor) -> int:
    """`_version`: grows with every write to the tensor or a view of it. Inference tensors have none: RuntimeError."""
    return int(x._version)


def make_wrapper(cls: type[Tensor], size: Any, strides: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A tensor of the subclass that has sizes and strides but no memory of its own."""
    make: Any = Tensor._make_wrapper_subclass
    return make(cls, size, strides=strides, dtype=dtype, device=device)


def is_marked_dynamic(x: Tensor) -> bool:
    """Whether torch._dynamo.mark_dynamic has noted dims on it, which a detached tensor does not keep."""
    return hasattr(x, "_dynamo_dynamic_indices")
