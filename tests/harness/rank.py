"""What runs in a rank's process: take a job, run it, reply, wait for the next one."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.config
import torch.distributed as dist

# The pool kills a rank that hangs; this bound only ends ranks whose pool has died without a word.
GROUP_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Job:
    """One call. The function travels as the file and the name it was defined under: pytest's importlib mode gives test
    modules no importable name, and two of them may share one."""

    size: int
    store: str
    module: str
    path: str
    qualname: str
    arguments: bytes


@dataclass(frozen=True)
class Value:
    """The function returned."""

    result: Any


@dataclass(frozen=True)
class Failure:
    """The function raised, or the process is gone. `at` is the monotonic clock, which all processes share."""

    what: str
    trace: str
    at: float
    died: bool = False


def collect_rarely() -> None:
    """What is imported stays: a look at all of it for every few hundred nodes of a graph was a tenth of the time.
    Nor is it looked at now: a rank would copy each page that it shares with the fork server."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def compile_without_measuring() -> None:
    """Dynamo empties the caches of the processor to time the guards of each graph, for its own log, and collects
    garbage behind each: a tenth of the time of a small graph."""
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0


def serve(connection: Connection, rank: int, stacks: str) -> None:
    """Runs jobs until the pool closes its end of `connection`. SIGUSR1 writes every thread's stack to `stacks`."""
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        collect_rarely()
        compile_without_measuring()
        torch._inductor.config.compile_threads = 1  # no compile workers that would outlive a killed rank
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # else the test would go on in eager and prove nothing
        store = ""
        while True:
            try:
                job: Job = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            try:
                if job.store != store:
                    join_group(job, rank)
                    store = job.store
                reply = pickle.dumps(Value(run(job)))
            except BaseException as error:  # a failing assert, pytest.fail and SystemExit alike belong to the caller
                what = f"{type(error).__name__}: {error}"
                reply = pickle.dumps(Failure(what, traceback.format_exc(), time.monotonic()))
            connection.send_bytes(reply)


def join_group(job: Job, rank: int) -> None:
    """Leave the old process group and meet the others in a new one."""
    # Not imported here: a rank that has not touched ringopt has no mesh to forget.
    registry = sys.modules.get("ringopt.distributed.mesh")
    if registry is not None:
        registry.forget_all()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{job.store}", rank=rank, world_size=job.size, timeout=GROUP_TIMEOUT
    )


def run(job: Job) -> Any:
    """The call itself, from the same start every time: one thread, seed 0, nothing compiled."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    failing = sys.modules.get("ringopt.drivers.failing")
    if failing is not None:
        failing.RAISES = True  # else a graph of which a pass fails would be left as it was, and be right
    target: Any = load(job.module, job.path)
    for name in job.qualname.split("."):
        target = getattr(target, name)
    return target(*pickle.loads(job.arguments))


def load(name: str, path: str) -> Any:
    """The module of `path`, executed once per process and known as `name`, so that its classes unpickle."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, path
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
