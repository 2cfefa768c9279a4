"""A piece of work in processes of its own, that may crash or hang: something is said of it in any case.

Processes come from a server that has imported what they need, so that a piece costs no imports. Imports nothing heavy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from ringopt.tools.benchmarks.lab.result import Row

# What is said of a type of models, whatever becomes of it.
NOTHING: Row = {
    "verdict": "", "error": None, "share": None, "later": None, "bytes": None, "by_sites": None, "memory": None,
    "compile": None, "by_inductor": None, "sites": 0, "sharded": 0, "graphs": 0, "reason": "", "hf": None, "layers": "",
}  # fmt: skip


def judged_apart(worker: str, kind: str, ranks: int, seconds: float, inner: str) -> Row:
    """What `judge(answers, kind, ranks, seconds, inner)` of the module `worker` sends, or why it sent nothing. Whatever
    it started in its session is ended."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([worker])
    here, there = server.Pipe(duplex=False)
    process = server.Process(target=_judge, args=(worker, there, kind, ranks, seconds, inner))
    begin, row = time.monotonic(), {}
    process.start()
    there.close()
    if heard := here.poll(seconds):
        with suppress(EOFError):
            row = here.recv()
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # it has ended, or has no session yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    if not row:
        row = (
            no_answer("error", died(process.exitcode)) if heard else no_answer("hang", f"not done after {seconds:g} s")
        )
    return {"type": kind, "ranks": ranks, "inner": inner, **row, "seconds": time.monotonic() - begin}


def _judge(worker: str, answers: Any, kind: str, ranks: int, seconds: float, inner: str) -> None:
    os.setsid()
    import_module(worker).judge(answers, kind, ranks, seconds, inner)


def no_answer(verdict: str, reason: str) -> Row:
    """A row without figures."""
    return {**NOTHING, "verdict": verdict, "reason": reason}


def died(code: int | None) -> str:
    """How a process ended."""
    return f"its process ended: {signal.Signals(-code).name if code and code < 0 else f'exit code {code}'}"
