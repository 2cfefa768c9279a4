"""The legacy profiler, which alone records every allocation on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import _ExperimentalConfig

__all__ = ["allocations"]


@contextmanager
def allocations() -> Iterator[list[int]]:
    """Within it, of this thread and of those that work for it, all that is allocated and freed; behind it the list
    holds the bytes of each, those that were freed negative, in the order in which it happened."""
    found: list[int] = []
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    threads: Any = ()
    try:
        yield found
    finally:
        threads = _disable_profiler_legacy()
    events = [event for of_thread in threads for event in of_thread]
    for event in sorted(events, key=events[0].cpu_elapsed_us):
        if str(event.kind()) == "memory_alloc":
            found.append(event.cpu_memory_usage())
