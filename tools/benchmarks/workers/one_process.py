"""One small model under backend="ring" and backend="inductor": seconds, bytes, and the distance from eager."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import torch
from torch import Tensor

from ringopt.tools.benchmarks.lab.names import BACKENDS
from ringopt.tools.benchmarks.lab.numbers import distance, numbers
from ringopt.tools.benchmarks.lab.result import MODES, Row
from ringopt.tools.benchmarks.lab.timing import interleaved
from ringopt.tools.benchmarks.models.small_models import CASES, build
from ringopt.tools.common.command import CommandError
from ringopt.tools.common.resident import STATUS, reset_peak, resident

Run = Callable[[], list[Tensor]]


def rows_of(name: str, length: int, repeats: int) -> list[Row]:
    """A row for each of MODES. Raises CommandError where a process that measures memory dies."""
    bytes_of = {backend: peaks(name, length, backend) for backend in BACKENDS}
    rows = []
    for mode, training in MODES.items():
        row: Row = {"model": name, "length": length, "mode": mode}
        seconds, errors = timed(name, length, training, repeats)
        for backend in BACKENDS:
            row[f"{backend}_seconds"], row[f"{backend}_error"] = seconds[backend], errors[backend]
            row[f"{backend}_bytes"] = bytes_of[backend][mode]
        ours, theirs = (row[f"{backend}_bytes"] for backend in BACKENDS)
        row["time_ratio"] = seconds["ring"] / seconds["inductor"]
        row["memory_ratio"] = ours / theirs if ours and theirs else None
        rows.append(row)
    return rows


def timed(name: str, length: int, training: bool, repeats: int) -> tuple[dict[str, float], dict[str, float | None]]:
    """By backend: the median of the seconds, and the distance from eager, None where dropout draws."""
    torch.compiler.reset()
    expected = call(name, length, training, None)()
    runs = {backend: call(name, length, training, backend) for backend in BACKENDS}
    draws = training and CASES[name].draws
    found = {backend: run() for backend, run in runs.items()}
    errors = {backend: None if draws else distance(values, expected) for backend, values in found.items()}
    del expected, found
    return interleaved(runs, repeats), errors


def call(name: str, length: int, training: bool, backend: str | None) -> Run:
    """One call of the model in eager (None) or compiled: outputs, and in training the gradients of x and parameters."""
    model, x, kept = build(name, length)
    model.train(training)
    wanted = [x.requires_grad_(), *model.parameters()] if training else []
    run = torch.compile(model, backend=backend) if backend else model
    return partial(numbers, run, (x, kept), wanted)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peaks(name: str, length: int, backend: str) -> dict[str, int | None]:
    """Bytes by mode, measured in a fresh process; None on a system without /proc."""
    if not STATUS.exists():
        return dict.fromkeys(MODES)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        try:
            return dict(fresh.submit(peaks_here, name, length, backend).result())
        except BrokenProcessPool:
            what = f"{name}, {length} tokens, backend={backend!r}"
            raise CommandError(f"{what}: the process died that measures memory; shorter --lengths need less") from None


def peaks_here(name: str, length: int, backend: str) -> dict[str, int]:
    """The first call compiles and is left out."""
    found = {}
    for mode, training in MODES.items():
        run = call(name, length, training, backend)
        run()
        before = reset_peak()
        run()
        found[mode] = resident("VmHWM") - before
    return found
