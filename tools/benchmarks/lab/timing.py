"""Time that other work of the machine changes little: calls by turns, and seconds of the processor."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping


def interleaved(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The median of `repeats` timed calls of each, in seconds. Every second round goes through them backwards. Warm
    them up before."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            begin = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in seconds.items()}


def processor_seconds() -> float:
    """What this process has used so far, and processes that it waited for (compilers)."""
    return sum(os.times()[:4])
