"""What the kernels for NVIDIA GPUs share: where they run, and operands as they read them from memory.

Sources: pytorch, aten/src/ATen/native/transformers/cuda (flash_attn/flash_api.cpp, attention_backward.cu,
mem_eff_attention/kernel_backward.h, sdp_utils.cpp) and native/cudnn/MHA.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import accumulator

HALF = (torch.bfloat16, torch.float16)
WIDTH = 8  # head dims are multiples of it
ALIGNMENT = 16  # bytes that a kernel loads at once: whatever it steps to begins at a multiple of them

_assumed: ContextVar[tuple[int, int] | None] = ContextVar("assumed", default=None)


@contextmanager
def assumed(capability: tuple[int, int]) -> Iterator[None]:
    """Within, CUDA tensors are on a GPU of this compute capability, with a build of torch and a cuDNN for it, whatever
    is here."""
    token = _assumed.set(capability)
    try:
        yield
    finally:
        _assumed.reset(token)


def is_assumed() -> bool:
    """Whether the GPU is one that need not be here."""
    return _assumed.get() is not None


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of the GPU, or of the assumed one."""
    return _assumed.get() or torch.cuda.get_device_capability(device)


def refusal(
    kernel: str, dtype: torch.dtype, device: torch.device, dtypes: tuple[torch.dtype, ...], capability: tuple[int, int]
) -> Refusal | None:
    """None, or why a GPU kernel of these dtypes, from this compute capability on, cannot run on `device`."""
    if device.type != "cuda":
        return Refusal(f"kernel {kernel} runs on NVIDIA GPUs, and the tensors are on {device.type}")
    if dtype not in dtypes:
        return Refusal(f"kernel {kernel} has no {dtype}; it has {', '.join(map(str, dtypes))}")
    if torch.version.hip is not None and not is_assumed():
        return Refusal(f"kernel {kernel} is for NVIDIA GPUs, and this torch is built for AMD's")
    if not is_assumed() and not torch.cuda.is_available():
        return Refusal(f"kernel {kernel} needs a GPU, and torch sees none")
    found = capability_of(device)
    if found < capability:
        needed, has = (f"{major}.{minor}" for major, minor in (capability, found))
        return Refusal(f"kernel {kernel} needs compute capability {needed}; this GPU has {has}")
    return None


def loadable(x: Tensor) -> Tensor:
    """`x` where the kernels can load it: its last dim dense and a multiple of WIDTH (zeros after it, which change no
    score and no value), and its rows, heads and batches at multiples of ALIGNMENT. A row that begins elsewhere is an
    error in one kernel, a misaligned address in another."""
    missing = -x.shape[-1] % WIDTH
    if missing:
        x = F.pad(x, (0, missing))
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Storage begins aligned: torch's allocators see to that. Sizes of 1 count, for not all kernels except them."""
    each = ALIGNMENT // x.element_size()
    return x.stride(-1) == 1 and all(place % each == 0 for place in (x.storage_offset(), *x.stride()[:-1]))


def tokens_first(x: Tensor) -> Tensor:
    """[B, H, S, D] that lies in memory as [B, S, H, D]."""
    turned = x.transpose(1, 2)
    dense = turned if turned.is_contiguous() else turned.clone(memory_format=torch.contiguous_format)
    return dense.transpose(1, 2)


def narrowed(x: Tensor, like: Tensor) -> Tensor:
    """`x` without what was added to the last dim of `like`."""
    return x.narrow(-1, 0, like.shape[-1])


def repeated(x: Tensor, groups: int) -> Tensor:
    """KV heads, one for each query head."""
    return x.repeat_interleave(groups, 1) if groups > 1 else x


def sum_groups(grad: Tensor, groups: int) -> Tensor:
    """The gradient of what was `repeated`."""
    if groups == 1:
        return grad
    return grad.unflatten(1, (-1, groups)).sum(2, dtype=accumulator(grad.dtype))  # type: ignore[no-any-return]
