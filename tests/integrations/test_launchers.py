"""Scripts that others launch have the right ranks, unchanged; where there is no process group, a message says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parent / "launched_script.py")
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""}

pytestmark = pytest.mark.zoo


def run(*words: str, **variables: str) -> tuple[str, str]:
    """What it printed: lines of losses, and all the rest."""
    done = subprocess.run(words, env={**os.environ, **QUIET, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[line.index("[") :] for line in done.stdout.splitlines() if " sharded" in line]
    return "\n".join(lines), done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone() -> str:
    """What one process prints."""
    line, _ = run(sys.executable, SCRIPT)
    assert line.endswith("on 1 ranks, 1 sharded") or line.endswith("on 1 ranks, 0 sharded")
    return line.partition(" on ")[0]


def test_torchrun(alone: str) -> None:
    line, _ = run(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT)
    assert line == f"{alone} on 2 ranks, 1 sharded"


def test_accelerate_launch(alone: str) -> None:
    pytest.importorskip("accelerate", reason="an extra: pip install 'ringopt[accelerate]'")
    options = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no")
    launch = ("-m", "accelerate.commands.launch", *options, "--dynamo_backend", "no", "--main_process_port", "29532")
    line, _ = run(sys.executable, *launch, SCRIPT)
    assert line == f"{alone} on 2 ranks, 1 sharded"


def test_srun(alone: str, tmp_path: Path) -> None:
    """The variables that srun sets for each task."""
    tasks = []
    for rank in range(2):
        names = {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_LOCALID": str(rank),
            "SLURM_STEP_NUM_TASKS": "2",
        }
        given = {**os.environ, **QUIET, **names, "STORE": f"file://{tmp_path}/store"}
        tasks.append(subprocess.Popen([sys.executable, SCRIPT, "slurm"], env=given, stdout=subprocess.PIPE, text=True))
    printed = [task.communicate(timeout=290)[0] for task in tasks]
    assert printed == [f"{alone} on 2 ranks, 1 sharded\n", ""]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_process_group_that_is_missing_is_named(alone: str, name: str) -> None:
    line, rest = run(sys.executable, SCRIPT, "without", **{name: "2"})
    assert line.startswith(alone) and f"launched as one of 2 ({name})" in rest and "init_process_group" in rest


def test_deepspeed_launcher(alone: str) -> None:
    pytest.importorskip("deepspeed", reason="pip install deepspeed")
    launch = ("-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", "29533")
    line, _ = run(sys.executable, *launch, SCRIPT, DS_ACCELERATOR="cpu")
    assert line == f"{alone} on 2 ranks, 1 sharded"


NOTEBOOK = """
import sys; sys.path.insert(0, {folder!r})
from accelerate import notebook_launcher
def work():
    import torch.distributed as dist, launched_script
    from accelerate import PartialState
    PartialState(cpu=True)
    line = launched_script.said()
    print(line, flush=True) if dist.get_rank() == 0 else None
notebook_launcher(work, num_processes=2, use_port="29534")
"""

RAY = """
import sys
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
def work():
    import sys; sys.path.insert(0, {folder!r})
    import torch.distributed as dist, launched_script
    line = launched_script.said()
    open({found!r}, "w").write(line) if dist.get_rank() == 0 else None
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
trainer = TorchTrainer(work, scaling_config=ScalingConfig(num_workers=2), torch_config=TorchConfig(backend="gloo"))
trainer.fit()
print(open({found!r}).read())
"""


def test_notebook_launcher(alone: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="an extra: pip install 'ringopt[accelerate]'")
    cell = tmp_path / "cell.py"
    cell.write_text(NOTEBOOK.format(folder=str(Path(SCRIPT).parent)))
    line, _ = run(sys.executable, str(cell), ACCELERATE_DEBUG_MODE="no", ACCELERATE_USE_CPU="yes")
    assert line == f"{alone} on 2 ranks, 1 sharded"


@pytest.mark.timeout(660)  # its controller waits a minute for an autoscaler before it starts workers
def test_ray_train(alone: str, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="pip install 'ray[train]'")
    script = tmp_path / "train.py"
    script.write_text(RAY.format(folder=str(Path(SCRIPT).parent), found=str(tmp_path / "line")))
    line, _ = run(sys.executable, str(script), RAY_AUTH_MODE="disabled")
    assert line == f"{alone} on 2 ranks, 1 sharded"
