"""Ranks on a node find each other whoever else calls them."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from ringopt.distributed.intra_node import calls
from ringopt.distributed.intra_node.calls import HELLO, address, answered, called, door, token
from ringopt.distributed.lookup import DEFAULT_TIMEOUT, process_mesh
from tests.distributed import strangers
from tests.distributed.reading import needs_reading

Ranks: TypeAlias = Callable[..., list[Any]]

pytestmark = needs_reading
NOBODY = 65534


@contextmanager
def calling(mode: str, user: int) -> Iterator[Callable[[], int]]:
    """With a stranger about; how often it has called."""
    command = [sys.executable, strangers.__file__, mode, str(user), "60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def told() -> int:
        process.kill()
        return int(process.communicate()[0].split()[-1])

    try:
        yield told
    finally:
        process.kill()
        process.wait()


def meets(timeout: float, late: float) -> tuple[float, list[int], list[float]]:
    """How long it took once all were there, whom it met, and what came of a message."""
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(late)  # the others listen meanwhile
    begin = time.monotonic()
    mesh = process_mesh(timeout_s=timeout)
    took = time.monotonic() - begin - (late if mesh.rank < mesh.size - 1 else 0)
    got = torch.empty(100_000)
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    mesh.exchange([(right, torch.full((100_000,), float(mesh.rank)))], [(left, got)], "step").wait()
    met = [] if mesh._links is None else sorted(mesh._links.lines)
    process_mesh(timeout_s=DEFAULT_TIMEOUT)  # for the tests that follow on these ranks
    return took, met, got.unique().tolist()


@pytest.mark.sample(2)
@pytest.mark.parametrize("mode", strangers.MODES)
@pytest.mark.parametrize("user", [-1, NOBODY])
def test_strangers_cost_nothing(ranks: Ranks, mode: str, user: int) -> None:
    if user >= 0 and os.getuid() != 0:
        pytest.skip("only root can call as another user")
    timeout = 100.0 + 10 * strangers.MODES.index(mode) + (user >= 0)  # a mesh is made once per timeout
    with calling(mode, user) as told:
        found = ranks(3, meets, timeout, 1.0)
        assert told() >= 2
    for rank, (took, met, got) in enumerate(found):
        assert met == [peer for peer in range(3) if peer != rank]
        assert got == [float((rank - 1) % 3)]
        assert took < 5.0, "nobody waited for a stranger, who would cost calls.PATIENCE"


# ---- one call --------------------------------------------------------------------------------------------------------
SECRETS = [secrets.token_bytes(16) for _ in range(3)]


def dialled(name: bytes, said: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(address(name))
    sock.send(said)
    return sock


def closed(sock: socket.socket) -> bool:
    """By the other end, before or after it had read what was sent."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_only_who_knows_the_secrets_is_accepted() -> None:
    name = uuid.uuid4().bytes
    wrong = [
        HELLO.pack(1, os.urandom(32)),
        HELLO.pack(1, token("call", SECRETS[::-1], 1, 0)),  # others' secrets
        HELLO.pack(1, token("call", SECRETS, 2, 0)),  # of another caller
        HELLO.pack(1, token("answer", SECRETS, 1, 0)),  # of the other end
        HELLO.pack(0, token("call", SECRETS, 0, 0)),  # of a rank that does not call here
        HELLO.pack(2**63, bytes(32)),
    ]
    with door(name, True) as entrance:
        strangers_ = [dialled(name, said) for said in wrong]
        sock = called(name, SECRETS, 1, 0, 5.0)
        assert sock is not None
        until = time.monotonic() + 5
        found = entrance.accepted([1], SECRETS, 0, until)
        assert list(found) == [1]
        assert answered(sock, SECRETS, 1, 0, until)
        again = dialled(name, HELLO.pack(1, token("call", SECRETS, 1, 0)))
        assert not entrance.accepted([], SECRETS, 0, until)
    assert all(map(closed, [*strangers_, again]))
    found[1].send(b"x")
    assert sock.recv(1) == b"x"


def test_who_does_not_authenticate_is_hung_up_on_and_not_left_to_the_collector() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    opened = calls.Door(None)
    opened.calls.put((here, HELLO.pack(1, os.urandom(32))))
    assert not opened.accepted([1], SECRETS, 0, time.monotonic() + 0.05)
    assert here.fileno() == -1 and closed(there)
    there.close()


def test_a_rank_that_does_not_call_is_waited_for_until_one_deadline() -> None:
    name, begin = uuid.uuid4().bytes, time.monotonic()
    with door(name, True) as entrance:
        stop = threading.Event()

        def dial() -> None:
            while not stop.wait(0.02):
                dialled(name, HELLO.pack(1, os.urandom(32))).close()

        caller = threading.Thread(target=dial)
        caller.start()
        assert not entrance.accepted([1, 2], SECRETS, 0, time.monotonic() + 0.5)
        stop.set()
        caller.join()
    assert 0.4 < time.monotonic() - begin < 4


def test_an_answer_of_somebody_else_is_none() -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until = time.monotonic() + 0.3
    for said in (b"", b"x", os.urandom(32), token("call", SECRETS, 1, 0), token("answer", SECRETS, 2, 0)):
        other.send(said)
        assert not answered(one, SECRETS, 1, 0, until)
    assert not answered(one, SECRETS, 1, 0, until), "silence"


def test_a_listener_of_another_user_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    name = uuid.uuid4().bytes
    monkeypatch.setattr(calls, "is_mine", lambda _sock: False)
    with door(name, True) as entrance:
        assert called(name, SECRETS, 1, 0, 5.0) is None
        assert not entrance.accepted([1], SECRETS, 0, time.monotonic() + 0.2)
        assert entrance.calls.empty()


def test_many_silent_calls_are_bounded_and_leave_nothing_open() -> None:
    name, before = uuid.uuid4().bytes, len(os.listdir("/proc/self/fd"))
    with door(name, True) as entrance:
        silent = []
        for _ in range(3 * calls.MOST_SILENT):
            silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent[-1].connect(address(name))
        sock = called(name, SECRETS, 1, 0, 5.0)
        found = entrance.accepted([1], SECRETS, 0, time.monotonic() + 5)
        assert list(found) == [1]
        assert len(os.listdir("/proc/self/fd")) - before < len(silent) + calls.MOST_SILENT + 10
    for each in (*silent, *found.values(), *([sock] if sock else [])):
        each.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
