"""Bytes that this process has resident, and the most it had."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident(key: str) -> int:
    """VmRSS or VmHWM (its peak) in bytes. Without /proc, the peak since the process began."""
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> int:
    """Begin VmHWM anew, and the bytes resident now. What malloc keeps of freed memory is given back first."""
    if STATUS.exists():
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")
