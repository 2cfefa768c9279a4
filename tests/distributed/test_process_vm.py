"""Reading the memory of another process: what the system is asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from ringopt.distributed.intra_node import process_vm


class System:
    """Copies 3 bytes at most, within this process. `asked`: bytes, spans of either side, and flags of each call."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int, int]] = []

    def process_vm_readv(self, process: int, mine: Any, to: Any, theirs: Any, of: Any, flags: Any) -> int:
        target, source = mine._obj, theirs._obj
        assert process == 7 and target.size == source.size
        self.asked.append((source.size, to.value, of.value, flags.value))
        copied = min(3, source.size)
        ctypes.memmove(target.address, source.address, copied)
        return copied


def test_what_the_system_leaves_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one span each, without flags: Linux knows none yet, and refuses a call with any."""
    system = System()
    monkeypatch.setattr(process_vm, "_libc", system)
    source, target = ctypes.create_string_buffer(b"12345678"), ctypes.create_string_buffer(8)
    process_vm.read_memory(7, ctypes.addressof(source), ctypes.addressof(target), 8)
    assert target.raw == b"12345678"
    assert system.asked == [(8, 1, 1, 0), (5, 1, 1, 0), (2, 1, 1, 0)]
