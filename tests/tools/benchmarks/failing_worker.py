"""A worker that does not do what it should: see test_bench_models.py."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def judge(answers: Any, kind: str, ranks: int, seconds: float, inner: str) -> None:
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(600)
    answers.send({"verdict": "exact", "error": 0.0})
