"""Nodes on one machine: the ranks of one share what the processes of a machine share, and those of two do not.

    with NodeLab(nodes=2, ranks=2, megabits=400) as lab:
        outcomes = lab.outcomes(function, *args)  # function(rank, ranks, *args), ready for init_process_group("gloo")

A node has network, PID, UTS, IPC and mount namespaces of its own. A veth pair of limited rate leads from it to a
bridge, as in tools/benchmarks/lab/link_lab.py, which this stands on. Its first process is process 1 there, and forks
the ranks, so processes of two nodes have the same ids.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ringopt.tools.benchmarks.lab import link_lab
from ringopt.tools.benchmarks.lab.link_lab import CLONE_NEWNET, INTERFACE, PORT, PR_SET_PDEATHSIG, LinkLab, Outcome

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWPID = 0x00020000, 0x04000000, 0x08000000, 0x20000000
MS_REC_PRIVATE = 0x4000 | 0x40000
OWN = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID


class NodeLab:
    """`ranks` on each of so many `nodes`, numbered node by node, as torchrun does."""

    def __init__(self, nodes: int, ranks: int, megabits: float = 400):
        self.nodes, self.ranks, self.links = nodes, ranks, LinkLab(nodes, megabits)

    def __enter__(self) -> NodeLab:
        self.links.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.links.close()

    def cut(self, node: int) -> None:
        self.links.cut(node)

    def mend(self, node: int) -> None:
        self.links.mend(node)

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 120.0,
        meanwhile: Callable[[NodeLab], object] = lambda _: None,
    ) -> list[Outcome]:
        """How each rank ended; `meanwhile` is called while they work."""
        way = link_lab.context()
        answers, processes = way.Queue(), []
        for node in range(self.nodes):
            given = (self.links.namespace(node), node, self.nodes, self.ranks, answers, function, args)
            processes.append(way.Process(target=as_node, args=given, daemon=True))
            processes[-1].start()
        try:
            meanwhile(self)
            return collected(answers, self.nodes * self.ranks, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()

    def values(self, function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        return link_lab.values(self.outcomes(function, *args, **how))


def collected(answers: Any, count: int, timeout: float) -> list[Outcome]:
    ended: dict[int, Outcome] = {}
    until = time.monotonic() + timeout
    while len(ended) < count and (left := until - time.monotonic()) > 0:
        try:
            outcome = answers.get(timeout=left)
        except queue.Empty:
            break
        ended[outcome.rank] = outcome
    late = f"still at work after {timeout:g} s"
    return [ended.get(rank, Outcome(rank, error=late, seconds=timeout)) for rank in range(count)]


def as_node(
    namespace: str, node: int, nodes: int, ranks: int, answers: Any, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    """The body of the process that stands outside of the node, for the first process inside is its child."""
    libc = ctypes.CDLL(None, use_errno=True)
    enter(libc, namespace)
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # and with the first process of a node all others end
    checked(libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
    socket.sethostname(f"node{node}")
    reading, writing = os.pipe()
    for local in range(ranks):
        if not os.fork():
            os.close(writing)
            os.read(reading, 1)  # until all are there: threads are numbered too, and nodes are to number ranks alike
            begin(node, nodes, local, ranks, answers, function, args)
    os.close(writing)
    for _ in range(ranks):
        os.wait()
    os._exit(0)


def enter(libc: Any, namespace: str) -> None:
    with Path(link_lab.NAMESPACES, namespace).open() as handle:
        checked(libc.setns(handle.fileno(), CLONE_NEWNET), "setns")
    checked(libc.unshare(OWN), "unshare")
    checked(libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None), "mount /")  # what is mounted here stays here


def checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def begin(
    node: int, nodes: int, local: int, ranks: int, answers: Any, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    """One rank. Does not return."""
    try:
        rank, size = node * ranks + local, nodes * ranks
        told = {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": str(node)}
        variables = link_lab.environment(rank, size, "10.77.0.1", PORT, INTERFACE) | told
        link_lab.as_rank(None, variables, answers, function, rank, size, args)
        answers.close()
        answers.join_thread()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def why_unavailable() -> str | None:
    """None where nodes can be made, else what is missing."""
    reason = link_lab.why_unavailable()
    if reason is not None:
        return reason
    child = os.fork()
    if not child:
        libc = ctypes.CDLL(None, use_errno=True)
        os._exit(ctypes.get_errno() or 1 if libc.unshare(OWN) else 0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return f"unshare of PID, UTS, IPC and mount namespaces: {os.strerror(code)}" if code else None


UNAVAILABLE = why_unavailable()
needs_nodes = pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or "")
