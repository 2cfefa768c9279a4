"""May processes here read each other's memory? Some kernels and containers forbid it."""

from __future__ import annotations

import ctypes
import os

import pytest

from ringopt.distributed.intra_node import process_vm


def allowed() -> bool:
    source, target = ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1)
    if not process_vm.available() or process_vm.scope() > 1:
        return False
    try:
        process_vm.read_memory(os.getpid(), ctypes.addressof(source), ctypes.addressof(target), 1)
    except OSError:
        return False
    return True


READS = allowed()
needs_reading = pytest.mark.skipif(not READS, reason="processes may not read each other's memory here")
