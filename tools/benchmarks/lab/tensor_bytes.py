"""How many bytes of tensors a call holds at once, as the allocator of the CPU counts them: the same at every run, with
what kernels and compiled code allocate for themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import _ExperimentalConfig


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run` allocates above what was allocated before; its result included, of this thread and of those
    of gloo that work for it. Meanwhile no garbage is collected, so that what is freed is of its own."""
    collects = gc.isenabled()
    gc.disable()
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()))
    try:
        kept = run()
    finally:
        threads = _disable_profiler_legacy()
        if collects:
            gc.enable()
    del kept
    events = [event for of_thread in threads for event in of_thread]
    level = most = 0
    for event in sorted(events, key=events[0].cpu_elapsed_us):
        if str(event.kind()) == "memory_alloc":
            level += event.cpu_memory_usage()
            most = max(most, level)
    return most
