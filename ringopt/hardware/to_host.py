"""Tensors of a device brought to the host, for what is decided there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Begins to copy them, all of one device; what is returned waits until they are there, and for nothing that was
    begun later. On the host they are there."""
    device = tensors[0].device if tensors else torch.device("cpu")
    if device.type == "cpu":
        return lambda: list(tensors)
    copies = [x.detach().to("cpu", non_blocking=True) for x in tensors]  # to memory that is pinned
    module = torch.get_device_module(device)
    arrived = module.Event()
    arrived.record(module.current_stream(device))  # not that of the current device, which may be another

    def read() -> list[Tensor]:
        arrived.synchronize()
        return copies

    return read
