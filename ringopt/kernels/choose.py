"""Which kernel computes the tiles of a site, and why."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.errors import OptionError
from ringopt.hardware.devices import Device
from ringopt.ir.refusal import Refusal
from ringopt.kernels.base import Kernel, TileInputs, WholeRows
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.kernels.cuda import assumed
from ringopt.kernels.cuda_cudnn import CudaCudnn
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash, implementation
from ringopt.kernels.math import Math

# Fastest first; "auto" takes the first that supports the case, or one that the device prefers.
KERNELS: tuple[Kernel, ...] = (CudaFlash(), CudaCudnn(), CudaEfficient(), CpuFlash(), Math())


class WithOthers(Kernel):
    """The first of `kernels`, and for each tile that it does not take the first of the others that does."""

    masks = True

    def __init__(self, *kernels: Kernel):
        self.name = kernels[0].name  # type: ignore[misc]
        self.kernels = kernels

    @property
    def bands(self) -> bool:
        return any(kernel.bands for kernel in self.kernels)

    def supports(self, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int) -> Refusal | None:
        refusals = (kernel.supports(dtype, device, key_dim, value_dim) for kernel in self.kernels)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def _forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        return self._for(tile)._forward(tile)

    def _backward(self, tile: TileInputs, rows: WholeRows) -> tuple[Tensor, Tensor, Tensor]:
        return self._for(tile)._backward(tile, rows)

    def _for(self, tile: TileInputs) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.takes(tile))


def choose_kernel(
    name: str, dtype: torch.dtype, device: torch.device, key_dim: int, value_dim: int
) -> tuple[Kernel, str]:
    """The kernel for heads of `key_dim` and `value_dim`, and the reason as a sentence.

    Raises OptionError when the kernel called for by `name` cannot do it, or, for "auto", when none can.
    """
    if device.type == "meta":  # a dry run of a model that would run here
        device = torch.device("cpu")
    if name not in ("auto", *(kernel.name for kernel in KERNELS)):
        raise OptionError(f"option kernel={name!r}: expected one of {['auto', *(kernel.name for kernel in KERNELS)]}")
    refusals = {kernel: kernel.supports(dtype, device, key_dim, value_dim) for kernel in KERNELS}
    able = [kernel for kernel in KERNELS if refusals[kernel] is None]
    able.sort(key=lambda kernel: not first_choice(kernel, device))
    wanted = [kernel for kernel in able if name in ("auto", kernel.name)]
    if not wanted:
        why = "; ".join(r.sentence for kernel, r in refusals.items() if r and name in ("auto", kernel.name))
        raise OptionError(f"option kernel={name!r}: {why}")
    kernel = wanted[0]
    faster = [
        r.sentence for other in KERNELS[: KERNELS.index(kernel)] if (r := refusals[other]) and made_for(other, device)
    ]
    reasons = ["asked for"] if name != "auto" else [*faster, "the fastest that supports this case"]
    if name == "auto" and first_choice(kernel, device):
        reasons = [*faster, "PyTorch's own first choice on this device"]
    if kernel.name == "flash":
        reasons.append(f"flash attention is {implementation()}")
    if not kernel.masks:
        masked = next(other for other in able if other.masks)
        banded = [] if kernel.bands else [other for other in able if other.bands][:1]
        reasons.append(f"tiles with a mask are left to {masked.name}")
        reasons += [f"windows to {other.name}" for other in banded]
        kernel = WithOthers(kernel, *banded, masked)
    return kernel, f"kernel {kernel.name}: " + "; ".join(reasons)


def kernel_on(gpu: Device, name: str, dtype: torch.dtype, key_dim: int, value_dim: int) -> tuple[Kernel, str]:
    """What `choose_kernel` would say on such a GPU, with a build of torch and a cuDNN that are current."""
    assert gpu.capability is not None
    with assumed(gpu.capability):
        kernel, reason = choose_kernel(name, dtype, torch.device("cuda"), key_dim, value_dim)
    return kernel, f"{reason} (on {gpu.name})"


def first_choice(kernel: Kernel, device: torch.device) -> bool:
    """Whether it comes before the order of KERNELS, which a flash attention that the user activated keeps."""
    return kernel.preferred(device) and implementation() == "FA2"


def made_for(kernel: Kernel, device: torch.device) -> bool:
    """Whether it is a kernel of such a device, so that a reader would have expected it."""
    return isinstance(kernel, CpuFlash) == (device.type == "cpu")
