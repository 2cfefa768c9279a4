"""A rank dies in the midst of a training; torchrun starts all ranks anew, and they go on from a checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
STEPS, DEATH = 5, 3


def trained(folder: Path, *arguments: str) -> list[tuple[int, int, str]]:
    """(start, step, loss) as rank 0 tells them."""
    folder.mkdir()
    command = [sys.executable, *TORCHRUN, "examples/train_restart.py", "--checkpoint", str(folder / "checkpoint.pt")]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [*command, "--steps", str(STEPS), *arguments],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"start (\d+), step (\d+): loss (\S+)", done.stdout)
    return [(int(start), int(step), loss) for start, step, loss in lines]


@pytest.mark.zoo  # nine processes begin
def test_a_killed_rank_costs_the_step_it_was_in(tmp_path: Path) -> None:
    disturbed = trained(tmp_path / "disturbed", "--die-at", str(DEATH))
    assert [(start, step) for start, step, _ in disturbed] == [(int(step >= DEATH), step) for step in range(STEPS)]
    alone = trained(tmp_path / "undisturbed")
    assert [loss for *_, loss in disturbed] == [loss for *_, loss in alone]
