"""What the kernels for NVIDIA GPUs share: where they run, and heads as wide as they want them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import accumulator

HALF = (torch.bfloat16, torch.float16)
WIDTH = 8  # head dims are multiples of it


def refusal(
    kernel: str, dtype: torch.dtype, device: torch.device, dtypes: tuple[torch.dtype, ...], capability: tuple[int, int]
) -> Refusal | None:
    """None, or why a GPU kernel of these dtypes, from this compute capability on, cannot run on `device`."""
    if device.type != "cuda":
        return Refusal(f"kernel {kernel} runs on NVIDIA GPUs, and the tensors are on {device.type}")
    if dtype not in dtypes:
        return Refusal(f"kernel {kernel} has no {dtype}; it has {', '.join(map(str, dtypes))}")
    if torch.version.hip is not None:
        return Refusal(f"kernel {kernel} is for NVIDIA GPUs, and this torch is built for AMD's")
    if not torch.cuda.is_available():
        return Refusal(f"kernel {kernel} needs a GPU, and torch sees none")
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        needed, has = (f"{major}.{minor}" for major, minor in (capability, found))
        return Refusal(f"kernel {kernel} needs compute capability {needed}; this GPU has {has}")
    return None


def pad_head_dim(x: Tensor) -> Tensor:
    """Zeros after the last dim, up to a multiple of WIDTH: they change no score and no value. Dense along that dim."""
    missing = -x.shape[-1] % WIDTH
    if missing:
        return F.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


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
