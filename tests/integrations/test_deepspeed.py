"""`engine.compile(backend="ring")` beside DeepSpeed's ZeRO: losses of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="pip install deepspeed")

EAGER = {"inner_backend": "eager"}
ON_TWO = {f"stage {stage}": {"zero": {"stage": stage}, "options": EAGER} for stage in range(4)}
ON_FOUR = {name: ON_TWO[name] for name in ("stage 0", "stage 1", "stage 2")}
SCRIPT = ("-m", "torch.distributed.run", "--standalone", "-m", "tests.integrations.deepspeed_trainings")

pytestmark = pytest.mark.zoo


def run(p: int, cases: dict[str, Any]) -> dict[str, Any]:
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, *SCRIPT[:3], "--nproc-per-node", str(p), *SCRIPT[3:], json.dumps(cases)]
    done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, timeout=420)
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert done.returncode == 0 and lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("found "))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("p", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_losses(p: int, cases: dict[str, Any]) -> None:
    expected, found = run(1, cases), run(p, cases)
    for name, losses in expected.items():
        assert found[name].get("loss") == pytest.approx(losses["loss"], rel=1e-5), (name, found[name])
        assert found[name]["sites"] and not found[name]["refused"]
