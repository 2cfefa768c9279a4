"""Bytes that this process has resident, and the most it had."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # options of mallopt


def resident(key: str) -> int:
    """VmRSS or VmHWM (its peak) in bytes. Without /proc, the peak since the process began."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def give_back() -> None:
    """From now on freed memory goes back to the system at once, so that what is resident is what is in use. Slow: for
    measuring memory."""
    if sys.platform == "linux":
        for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            ctypes.CDLL(None).mallopt(option, 65536)


def reset_peak() -> int:
    """Begin VmHWM anew, and the bytes resident now. What malloc keeps of freed memory is given back first."""
    if STATUS.exists():
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")
