"""Cross memory attach: one process reads another's memory, in one copy that the kernel makes.

process_vm_readv(2), as MPI libraries send messages within a node (Open MPI's and UCX's "cma"). Linux only; the
permissions are those of ptrace(2): processes of one user, unless the system is stricter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from typing import Any

YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
PR_SET_PTRACER = 0x59616D61  # of linux/prctl.h
LAUNCHER_ENDED = " (under Yama, whoever has started the ranks must run as long as they do)"


class Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


def _library() -> Any:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


_libc = _library()


def available() -> bool:
    """Whether the system has process_vm_readv."""
    return hasattr(_libc, "process_vm_readv")


def scope() -> int:
    """The ptrace scope of Yama, 0 without it. Who may read a process: 0 its user, 1 those that it names, 2 the
    administrator, 3 no one."""
    return int(YAMA.read_text()) if YAMA.exists() else 0


def permit() -> None:
    """Lets the descendants of this process's parent read its memory under Yama's scope 1, for ranks have one launcher.
    The user must still be the same. A no-op without Yama."""
    _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(process: int, address: int, into: int, size: int) -> None:
    """Copies `size` bytes from `address` of `process` to the address `into`. Raises OSError."""
    done = 0
    while done < size:  # Linux copies at most 2 GiB less a page at a time
        mine, theirs = Span(into + done, size - done), Span(address + done, size - done)
        copied = _libc.process_vm_readv(
            process, ctypes.byref(mine), ctypes.c_ulong(1), ctypes.byref(theirs), ctypes.c_ulong(1), ctypes.c_ulong(0)
        )
        if copied <= 0:
            number = ctypes.get_errno()
            why = os.strerror(number) + (LAUNCHER_ENDED if number == errno.EPERM else "")
            raise OSError(number, f"the memory of process {process} cannot be read: {why}")
        done += copied
