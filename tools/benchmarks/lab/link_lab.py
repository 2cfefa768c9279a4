"""Ranks on one machine, joined by links of known speed.

    with LinkLab(ranks=2, megabits=400) as lab:
        seconds = lab.run(measure, 4096)  # measure(rank, ranks, 4096), ready for init_process_group("gloo")

A rank lives in a network namespace of its own. A veth pair leads from it to a bridge, and a token bucket filter
(tc tbf) at both of its ends lets a rank send and receive `megabits` a second, both at once, as the port of a switch
does. Who waits for such a link needs no processor meanwhile: a small machine shows what is hidden behind compute. Links
can be cut and mended and ranks killed while they work. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringopt.tools.common.command import CommandError

NAMESPACES = Path("/var/run/netns")
PREFIX = "ringopt-lab-"
INTERFACE = "link0"
PORT = 29500
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
BURST = "256kb"  # what passes at once, however slow the link
QUEUE = "200ms"  # what may wait before packets are dropped


class LabError(CommandError):
    """The machine cannot host a lab, or a rank in it failed."""


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a value, or with an error, after so many seconds."""

    rank: int
    value: Any = None
    error: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Links:
    """The links of the lab called `name`, which its ranks may shape as well."""

    name: str
    ranks: int

    @property
    def hub(self) -> str:
        return f"{self.name}-hub"

    def namespace(self, rank: int) -> str:
        return f"{self.name}-{rank}"

    def set_rate(self, megabits: float) -> None:
        """Also while ranks are at work: what each sends is shaped at its own end, what it receives at the bridge's."""
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", BURST, "latency", QUEUE)
        for rank in range(self.ranks):
            _command("tc", "-n", self.namespace(rank), "qdisc", "replace", "dev", INTERFACE, *shape)
            _command("tc", "-n", self.hub, "qdisc", "replace", "dev", f"port{rank}", *shape)


class LinkLab:
    """`ranks` namespaces on one bridge. Whatever happens inside the context, nothing of it is left behind."""

    def __init__(self, ranks: int, megabits: float):
        self.ranks, self.megabits = ranks, megabits
        self.name = f"{PREFIX}{os.getpid()}"
        self.links = Links(self.name, ranks)
        self.hub, self.namespace, self.set_rate = self.links.hub, self.links.namespace, self.links.set_rate
        self._processes: list[Any] = []

    # ---- the network -----------------------------------------------------------------------------------------------
    def __enter__(self) -> LinkLab:
        if reason := why_unavailable():
            raise LabError(f"no link lab on this machine: {reason}")
        remove_orphans()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self.hub)
        _ip("link", "add", "hub", "netns", self.hub, "type", "bridge")
        _ip("-n", self.hub, "link", "set", "hub", "up")
        for rank in range(self.ranks):
            home, port = self.namespace(rank), f"port{rank}"
            _ip("netns", "add", home)
            _ip("link", "add", INTERFACE, "netns", home, "type", "veth", "peer", "name", port, "netns", self.hub)
            _ip("-n", self.hub, "link", "set", port, "master", "hub", "up")
            _ip("-n", home, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", home, "link", "set", interface, "up")
        self.set_rate(self.megabits)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        for namespace in (self.hub, *map(self.namespace, range(self.ranks))):  # which takes its veth pair along
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def cut(self, rank: int) -> None:
        """As if its cable were pulled: nothing is reset, packets no longer arrive."""
        _ip("-n", self.hub, "link", "set", f"port{rank}", "down")

    def mend(self, rank: int) -> None:
        _ip("-n", self.hub, "link", "set", f"port{rank}", "up")

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()

    # ---- the ranks -------------------------------------------------------------------------------------------------
    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """What `function(rank, ranks, *args)` returns on each rank. Raises LabError where one did not return."""
        return values(self.outcomes(function, *args, timeout=timeout))

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 300.0,
        meanwhile: Callable[[LinkLab], object] | None = None,
    ) -> list[Outcome]:
        """As `run`, but returns how each rank ended. `meanwhile` is called here while they work: the place to cut, mend
        and kill. Ranks still at work after `timeout` seconds are killed."""
        places = [
            (self.namespace(rank), environment(rank, self.ranks, "10.77.0.1", PORT, INTERFACE))
            for rank in range(self.ranks)
        ]
        self._processes, answers = start(places, function, args)
        if meanwhile is not None:
            meanwhile(self)
        outcomes = outcomes_of(self._processes, answers, timeout)
        self._processes = []
        return outcomes


def start(
    places: Sequence[tuple[str | None, dict[str, str]]], function: Callable[..., Any], args: Sequence[Any]
) -> tuple[list[Any], Any]:
    """A process for each (namespace, environment), and the queue in which they answer."""
    way = context()
    answers, processes = way.Queue(), []
    for rank, (namespace, variables) in enumerate(places):
        given = (namespace, variables, answers, function, rank, len(places), args)
        process = way.Process(target=as_rank, args=given, daemon=True)
        process.start()
        processes.append(process)
    return processes, answers


def context() -> Any:
    """How processes are started: each from nothing, as on a machine of its own."""
    return multiprocessing.get_context("spawn")


def outcomes_of(processes: Sequence[Any], answers: Any, timeout: float) -> list[Outcome]:
    """How each ended; whoever is late is killed."""
    ended: dict[int, Outcome] = {}
    begin = time.monotonic()
    while len(ended) < len(processes) and time.monotonic() - begin < timeout:
        with suppress(queue.Empty):
            outcome = answers.get(timeout=0.1)
            ended[outcome.rank] = outcome
            continue
        for rank, process in enumerate(processes):
            if rank not in ended and process.exitcode:
                died = f"died: {_exit_name(process.exitcode)}"
                ended[rank] = Outcome(rank, error=died, seconds=time.monotonic() - begin)
    for process in processes:
        if len(ended) < len(processes):
            process.kill()
        process.join()
    late = f"still at work after {timeout:g} s"
    return [ended.get(rank, Outcome(rank, error=late, seconds=timeout)) for rank in range(len(processes))]


def as_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """As `LinkLab.run`, without namespaces: over the loopback of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    places = [(None, environment(rank, ranks, "127.0.0.1", port, "lo")) for rank in range(ranks)]
    return values(outcomes_of(*start(places, function, args), timeout))


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Raises LabError where a rank did not return."""
    if failed := [f"rank {outcome.rank}: {outcome.error}" for outcome in outcomes if outcome.error]:
        raise LabError("; ".join(failed))
    return [outcome.value for outcome in outcomes]


def environment(rank: int, ranks: int, address: str, port: int, interface: str) -> dict[str, str]:
    """As torchrun sets it, one thread a rank."""
    where = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": interface}
    return {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **where}


def as_rank(
    namespace: str | None,
    variables: dict[str, str],
    answers: Any,
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    args: Sequence[Any],
) -> None:
    """The body of a rank's process."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # never to outlive the lab
    if namespace is not None:
        with (NAMESPACES / namespace).open() as handle:
            if libc.setns(handle.fileno(), CLONE_NEWNET):  # os.setns is there from Python 3.12 on
                raise OSError(ctypes.get_errno(), f"setns {namespace}")
    os.environ.update(variables)
    begin = time.monotonic()
    try:
        answers.put(Outcome(rank, function(rank, ranks, *args), seconds=time.monotonic() - begin))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {str(error).strip()}"
        answers.put(Outcome(rank, error=text, seconds=time.monotonic() - begin))


def why_unavailable() -> str | None:
    """None where a lab can be built, else what is missing."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"making network namespaces takes root, and this is user {os.geteuid()}"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; install iproute2"
    probe = f"{PREFIX}{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("link", "add", "hub", "netns", probe, "type", "bridge")
        _command(
            "tc",
            "-n",
            probe,
            "qdisc",
            "add",
            "dev",
            "hub",
            "root",
            "tbf",
            *("rate", "1mbit"),
            "burst",
            BURST,
            *("latency", QUEUE),
        )
    except LabError as refused:
        return str(refused)
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


def remove_orphans() -> None:
    """Namespaces of labs whose process is gone."""
    for path in NAMESPACES.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _exit_name(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _ip(*words: str) -> None:
    _command("ip", *words)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(words)}` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
