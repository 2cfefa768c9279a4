"""The machine that a table was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import ringopt

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where a table was measured: hardware, system and versions. `threads`: those of torch in this process."""

    cpu: str
    cores: int
    threads: int
    gpu: str
    system: str
    torch: str
    ringopt: str

    def __str__(self) -> str:
        gpu = f"{self.gpu}, " if self.gpu else ""
        where = f"{gpu}{self.cores} cores of {self.cpu}, {self.threads} threads, {self.system}"
        return f"{where}, torch {self.torch}, ringopt {self.ringopt}"


def this_machine() -> Machine:
    """`cores` are those that this process may use, `threads` those that torch does; `gpu` is the first, or ""."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return Machine(_cpu_model(), cores, torch.get_num_threads(), gpu, system, torch.__version__, ringopt.__version__)


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "an unnamed CPU"
