"""Models of transformers that Liger patched: losses and gradients of one process, and attention on shards. Its kernels
run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.liger_trainings import LENGTHS

pytest.importorskip("triton", reason="pip install triton")
pytest.importorskip("liger_kernel", reason="pip install liger-kernel")
pytestmark = [pytest.mark.zoo, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SET = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
SET |= {"LIGER_FUSED_MOE_AUTOTUNE": "0"}  # which asks a GPU
# Norms, rotations, gates and losses as each of Liger's patches has them.
TYPES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "mixtral", "olmo2", "phi3")


def printed(types: tuple[str, ...], *words: str) -> list[list[str]]:
    given = {**os.environ, **SET, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, *words, "-m", "tests.integrations.liger_trainings"]
    done = subprocess.run([*command, *types], env=given, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines() if line.startswith(("numbers", "report"))]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str], list[float]]:
    return {(name, tokens): [*map(float, numbers)] for _, name, tokens, *numbers in printed(TYPES)}


@pytest.mark.parametrize(("p", "types"), [(2, TYPES), (3, ("llama", "mixtral"))])
def test_patched_models(alone: dict[tuple[str, str], list[float]], p: int, types: tuple[str, ...]) -> None:
    lines = printed(types, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={p}")
    seen = [line for line in lines if line[0] == "numbers"]
    assert len(seen) == len(LENGTHS) * p * len(types)
    for _, name, tokens, *numbers in seen:
        assert [*map(float, numbers)] == pytest.approx(alone[name, tokens], rel=1e-4, abs=1e-6), name
    reports = [line[1:] for line in lines if line[0] == "report"]
    # Two each: of the first length, and of all others.
    assert sorted(reports) == sorted([name, "1.0", "2"] for name in types for _ in range(2 * p))
