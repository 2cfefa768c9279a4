"""A pool of real processes for tests that need a gloo process group.

Starting a process that has torch, Dynamo and transformers imported takes seconds; a fork server pays for that once per
pytest session and forks the ranks. The ranks stay alive from test to test, and so does their process group as long as
the number of ranks does not change.

Nothing here hangs: the first rank that raises, dies or exceeds the timeout ends the call with a RankError that holds
its traceback (or its stack); all ranks are killed then, and the next call starts new ones.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.harness.rank import Failure, Job, Value, serve

MAX_RANKS = 8
# Ranks that start later in the session have ringopt from here too: its code may be edited while the tests run, and the
# handshake would find the ranks' versions unequal.
PRELOAD = [
    "pytest",
    "torch.distributed",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "transformers.models.llama.modeling_llama",
    "tests.harness.rank",
    "ringopt.backend",
    "ringopt.functional",
]
# How long to listen on after a failure: the other ranks' failures tell which one came first.
GRACE = 0.2


class RankError(AssertionError):
    """A rank raised, died or hung. `rank` is its number; the message ends with its traceback or stack."""

    def __init__(self, rank: int, size: int, function: str, failure: Failure, others: str = ""):
        self.rank = rank
        super().__init__(f"rank {rank} of {size} in {function}: {failure.what}{others}\n{failure.trace}".rstrip())


@dataclass
class Rank:
    """A process and the pool's end of the pipe to it."""

    number: int
    process: ForkServerProcess
    connection: Connection
    stacks: Path

    def reply(self) -> Value | Failure:
        try:
            answer: Value | Failure = pickle.loads(self.connection.recv_bytes())
            return answer
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return Failure(f"the process died with exit code {self.process.exitcode}", "", time.monotonic(), died=True)

    def stack(self) -> str:
        """Where the process is now, in Python."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.2)
        return f"stack of rank {self.number}:\n{self.stacks.read_text()}"

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()


class RankPool:
    """Ranks 0..3, started when they are first needed. Not for use by two threads at a time.

    With `hash_seeds` each rank is a Python of its own with its PYTHONHASHSEED, as torchrun starts them: a set of
    strings has another order in each. Those of the fork server share one."""

    def __init__(self, hash_seeds: Sequence[int] = ()) -> None:
        self._hash_seeds = tuple(hash_seeds)
        self._ranks: list[Rank] = []
        self._size = 0
        self._meetings = 0
        self._folder = tempfile.TemporaryDirectory(prefix="ringopt-ranks-")

    def run(self, p: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Calls `function(*args)` on ranks 0..p-1 of a gloo process group of p; the results in rank order.

        `function` is a function of a module (ranks import it by file and name); arguments and results travel by
        pickle, so every rank has its own copy. Raises RankError.
        """
        if not 1 <= p <= MAX_RANKS:
            raise ValueError(f"{p} ranks asked for: the pool holds 1 to {MAX_RANKS}")
        name = describe(function)
        self._start(p)
        job = Job(
            size=p,
            store=self._meeting(p),
            module=function.__module__,
            path=inspect.getfile(function),
            qualname=function.__qualname__,
            arguments=pickle.dumps(args),
        )
        try:
            message = pickle.dumps(job)
            for rank in self._ranks[:p]:
                rank.connection.send_bytes(message)
            return self._collect(self._ranks[:p], name, timeout)
        except BaseException:  # a KeyboardInterrupt too: the ranks are in the middle of something
            self.kill()
            raise

    def kill(self) -> None:
        """Ends all ranks; the next `run` starts new ones."""
        while self._ranks:
            self._ranks.pop().kill()
        self._size = 0

    def close(self) -> None:
        self.kill()
        self._folder.cleanup()

    def _start(self, p: int) -> None:
        if not all(rank.process.is_alive() for rank in self._ranks):
            self.kill()
        if len(self._ranks) >= p:
            return
        context: Any = multiprocessing.get_context("spawn") if self._hash_seeds else fork_server()
        for number in range(len(self._ranks), p):
            ours, theirs = context.Pipe()
            stacks = Path(self._folder.name, f"stacks-{number}-{self._meetings}")
            process = context.Process(target=serve, args=(theirs, number, str(stacks)), daemon=True)
            seeds = {"PYTHONHASHSEED": str(self._hash_seeds[number])} if self._hash_seeds else {}
            with one_thread(), environment(**seeds):
                process.start()
            theirs.close()
            self._ranks.append(Rank(number, process, ours, stacks))

    def _meeting(self, p: int) -> str:
        """The file the ranks meet at: a new one, hence a new process group, only when p changes."""
        if p != self._size:
            self._size = p
            self._meetings += 1
        return os.path.join(self._folder.name, f"store-{self._meetings}")

    def _collect(self, ranks: list[Rank], function: str, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, Failure] = {}
        while len(results) < len(ranks) and not failures:
            waiting = [rank for rank in ranks if rank.number not in results]
            replies = receive(waiting, deadline - time.monotonic())
            if not replies:
                stacks = "\n".join(rank.stack() for rank in waiting)
                failure = Failure(f"no result after {timeout:g} s", stacks, deadline)
                raise RankError(waiting[0].number, len(ranks), function, failure)
            for rank, reply in replies:
                if isinstance(reply, Value):
                    results[rank.number] = reply.result
                else:
                    failures[rank.number] = reply
        if failures:
            silent = [rank for rank in ranks if rank.number not in results and rank.number not in failures]
            late = receive(silent, GRACE)
            failures |= {rank.number: reply for rank, reply in late if isinstance(reply, Failure)}
            raise first(failures, len(ranks), function)
        return [results[rank.number] for rank in ranks]


def fork_server() -> ForkServerContext:
    """Processes that have all of PRELOAD from the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with one_thread():
        forkserver.ensure_running()
    return context


def describe(function: Callable[..., Any]) -> str:
    """`module::name`. Raises TypeError for what another process could not look up."""
    name = getattr(function, "__qualname__", None)
    if not inspect.isfunction(function) or name is None or "<" in name:
        raise TypeError(f"{function!r} is not a function of a module: a rank could not look it up by name")
    return f"{function.__module__}::{name}"


def receive(ranks: list[Rank], seconds: float) -> list[tuple[Rank, Value | Failure]]:
    """The replies that are there as soon as there is one; none after `seconds`."""
    by_connection = {rank.connection: rank for rank in ranks}
    ready = wait(list(by_connection), max(seconds, 0.0))
    return [(rank, rank.reply()) for connection, rank in by_connection.items() if connection in ready]


def first(failures: dict[int, Failure], size: int, function: str) -> RankError:
    """The failure that came first. A dead process goes before: its peers raise because it is gone."""
    order = sorted(failures, key=lambda number: (not failures[number].died, failures[number].at))
    others = "".join(f"\n  then rank {number}: {failures[number].what.splitlines()[0]}" for number in order[1:])
    return RankError(order[0], size, function, failures[order[0]], others)


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenMP in the fork server: a pool of threads does not survive a fork, and the ranks would hang in it."""
    with environment(OMP_NUM_THREADS="1"):
        yield


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


POOL = RankPool()
run_on_ranks = POOL.run
