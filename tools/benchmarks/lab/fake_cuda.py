"""What runs on a GPU, seen without one: tensors that have sizes and a device and no numbers, and what is asked of them.

A build of torch for the CPU refuses most operations on fake CUDA tensors for want of a device guard; one that does
nothing is compiled, which takes a C++ compiler. Not seen: time, order, numbers, and autograd within such tensors.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ringopt.torch_compat.fake_tensors import FakeTensorMode
from ringopt.torch_compat.pytree import tree_leaves
from ringopt.torch_compat.schema import schema_of
from ringopt.torch_compat.tensors import TorchDispatchMode

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }
"""

# By the names of ATen: what computes nothing.
VIEWS = (
    *("view", "_unsafe_view", "reshape", "slice", "select", "narrow", "split", "split_with_sizes", "unbind", "detach"),
    *("transpose", "t", "permute", "expand", "squeeze", "unsqueeze", "unflatten", "as_strided", "alias", "lift_fresh"),
)
EMPTY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


def missing() -> str:
    """Why no fake device can be had here, or ""."""
    if torch.cuda.is_available():
        return ""
    lacking = [name for name in ("g++", "ninja") if shutil.which(name) is None]
    return f"fake CUDA tensors take a C++ compiler: {' and '.join(lacking)} not found" if lacking else ""


@cache
def load_guard() -> None:
    """Once a process; on a machine with a GPU torch has a guard."""
    if not torch.cuda.is_available():
        from torch.utils.cpp_extension import load_inline

        folder = mkdtemp(prefix="ringopt-fake-cuda-")
        options = {"is_python_module": False, "build_directory": folder, "no_implicit_headers": True}
        load_inline("ringopt_fake_cuda", [SOURCE], **options)
        shutil.rmtree(Path(folder))


class Event:
    """Of a stream of no device."""

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


class FakeModule:
    """In place of torch.cuda."""

    Event = Event

    @staticmethod
    def current_stream(device: torch.device) -> None: ...

    @staticmethod
    def is_available() -> bool:  # torch 2.12 asks
        return True


class LaunchCounter(TorchDispatchMode):
    """Counts launches by operator, copies to and from the host, and reads of numbers from the device, each of which
    waits for all that was launched before. What is read is True, 0 or 0.5: of a mask, that all is seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches, self.copies, self.reads = Counter[str](), 0, 0

    @property
    def attention(self) -> int:
        """Calls of attention kernels."""
        return sum(number for name, number in self.launches.items() if "attention" in name)

    @property
    def others(self) -> int:
        return self.launches.total() - self.attention

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = schema_of(func).name.partition("::")[2]
        if name == "_local_scalar_dense":
            self.reads += args[0].is_cuda
            dtype = args[0].dtype
            return dtype == torch.bool or (0.5 if dtype.is_floating_point else 0)
        out = func(*args, **(kwargs or {}))
        places = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.dim()}
        if "cuda" in places and name not in (*VIEWS, *EMPTY, "device"):
            self.launches[name] += 1
            self.copies += name in ("_to_copy", "copy_") and "cpu" in places
        return out


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Within, `device="cuda"` is a device of which nothing but sizes is known."""
    load_guard()
    with patch.object(torch, "get_device_module", lambda device: FakeModule), FakeTensorMode():
        yield
