"""Memory of a rank falls as 1 / p: real processes, for it is the resident memory of a process that counts."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ringopt.distributed.lookup import process_mesh
from ringopt.ops.ring import VERSION

Ranks = Callable[..., list[Any]]

LENGTH, HEADS, DIM = 2048, 32, 64  # what is held falls with rows times heads, what is computed with rows squared
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt


def status(field: str) -> int:
    """KiB, from /proc/self/status."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if field in line)


def rise() -> float:
    """MiB by which the resident memory rises in one forward, above its inputs."""
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):  # what is freed goes back at once, so that the peak is the peak
        ctypes.CDLL(None).mallopt(option, 65536)
    mesh = process_mesh()
    shard = (1, HEADS, LENGTH // mesh.size, DIM)
    given = [*(torch.randn(shard) for _ in range(3)), [], None, None]
    given += [LENGTH, LENGTH, "full", "", [], 0.0, DIM**-0.5]
    given += ["contiguous", "contiguous", "ring", "auto", mesh.name, VERSION]
    torch.ops.ringopt.ring_attention(*given)  # threads, sockets and the kernel's own buffers are there from now on
    mesh.all_reduce(torch.ones(1))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    torch.ops.ringopt.ring_attention(*given)
    return (status("VmHWM") - before) / 1024


def test_forward_memory_falls_as_1_over_p(ranks: Ranks) -> None:
    if sys.platform != "linux":
        pytest.skip("resident memory and its peak are read from /proc")
    two, four = max(ranks(2, rise)), max(ranks(4, rise))
    shard = LENGTH * HEADS * DIM * 4 / 2**20  # MiB of q, on one process; k and v are as large
    assert two == pytest.approx(5 * shard / 2, rel=0.1), "own K, V on their way out, others' coming in, the output"
    assert four == pytest.approx(two / 2, rel=0.1)
