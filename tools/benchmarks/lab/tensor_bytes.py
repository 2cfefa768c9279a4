"""How many bytes of tensors a call holds at once, as the allocator of the CPU counts them: the same at every run, with
what kernels and compiled code allocate for themselves."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ringopt.torch_compat.profiler import allocations


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that `run` allocates above what was allocated before; its result included, of this thread and of those
    of gloo that work for it. Meanwhile no garbage is collected, so that what is freed is of its own."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with allocations() as events:
            kept = run()
    finally:
        if collects:
            gc.enable()
    del kept
    level = most = 0
    for size in events:
        level += size
        most = max(most, level)
    return most
