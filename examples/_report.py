"""What train_llama.py measures and prints: time, memory and bytes of a run, and two runs beside each other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

import ringopt
from ringopt.tools.common.resident import reset_peak, resident

MIB = 2**20


@dataclass
class Run:
    """One process's training. The first step compiles: `seconds` has it, the memory figures leave it out.

    peak     most bytes resident during the later steps, all of the process
    before   bytes resident when the first of them began: interpreter, libraries, code, parameters, optimizer state
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    before: int = 0
    sent: int = 0

    @contextmanager
    def measured(self) -> Iterator[Run]:
        """Around the training loop."""
        with ringopt.record_traffic() as traffic:
            yield self
        self.peak, self.sent = resident("VmHWM"), traffic.bytes_sent

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        if len(self.seconds) == 1:
            self.before = reset_peak()
        begin = time.perf_counter()
        yield
        self.seconds.append(time.perf_counter() - begin)


def single_process(script: str, arguments: Sequence[str]) -> Run:
    """The same training in one process, with the threads of one rank; its progress goes to our stderr."""
    command = [sys.executable, script, *arguments, "--single"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Run(**json.loads(output.splitlines()[-1]))


def dump(run: Run) -> str:
    return json.dumps(asdict(run))


def compare(runs: Sequence[Run], single: Run, bound: float) -> bool:
    """Prints losses and costs side by side; whether all losses agree to `bound`, relative."""
    console = Console()
    losses = Table("step", *(f"rank {rank}" for rank in range(len(runs))), "single process", "relative difference")
    worst = 0.0
    for step, expected in enumerate(single.losses):
        row = [run.losses[step] for run in runs]
        difference = max(abs(loss - expected) / abs(expected) for loss in row)
        worst = max(worst, difference)
        losses.add_row(str(step + 1), *(f"{loss:.7f}" for loss in row), f"{expected:.7f}", f"{difference:.1e}")
    console.print(losses)

    costs = Table("", *(f"rank {rank}" for rank in range(len(runs))), "single process")
    everyone = [*runs, single]
    rows = {
        "first step, with compilation, s": [run.seconds[0] for run in everyone],
        "later steps, mean, s": [sum(run.seconds[1:]) / max(len(run.seconds) - 1, 1) for run in everyone],
        "peak memory of later steps, MiB": [run.peak / MIB for run in everyone],
        "  above what the process held before, MiB": [(run.peak - run.before) / MIB for run in everyone],
        "bytes sent, all steps, MiB": [run.sent / MIB for run in everyone],
    }
    for name, values in rows.items():
        costs.add_row(name, *(f"{value:,.1f}" for value in values))
    console.print(costs)
    agree = worst <= bound
    verdict = "equal to rounding" if agree else "DIFFERENT"
    console.print(f"losses: largest relative difference {worst:.1e}, allowed {bound:.0e}: {verdict}")
    return agree
