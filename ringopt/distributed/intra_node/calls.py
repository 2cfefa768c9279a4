"""Authenticated connections between ranks of one node, over Unix sockets.

The name of a listening Unix socket is public, so any process of the machine can connect to it. The kernel tells the
user of the other end, and a peer authenticates itself by what only ranks know: each has drawn a secret, which went to
the others through the process group. A token is a keyed hash of caller and callee; secrets are drawn for one mesh, so
that no token can be replayed. A thread accepts connections: those of other users, closed or silent ones hold up
nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import queue
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringopt.distributed.intra_node.messages import PACKET

CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
HELLO = struct.Struct("<Q32s")  # the calling rank, its token
SECRET = 16  # bytes
# Connections of this user without a HELLO yet; the oldest is closed for one more.
MOST_SILENT = 128
PAUSE = 0.01  # seconds, where no connection can be accepted


def address(name: bytes) -> bytes:
    """The abstract Unix socket of that name."""
    return b"\0ringopt-" + name.hex().encode()  # abstract: there is no file, and nothing is left behind


def process_of(sock: socket.socket) -> int:
    """The process id of the other end, as seen from here: it may have another in its own namespace."""
    return int(_credentials(sock)[0])


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    process, user, group = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return process, user, group


def is_mine(sock: socket.socket) -> bool:
    """Whether the other end is a process of this user."""
    return _credentials(sock)[1] == os.geteuid()


def token(way: str, secrets: Sequence[bytes], caller: int, called: int) -> bytes:
    """The token of the caller (`way` "call") or of the callee ("answer"): an HMAC of both secrets."""
    return hmac.digest(secrets[caller] + secrets[called], f"{way} {caller} {called}".encode(), "sha256")


# ---- the calling end -------------------------------------------------------------------------------------------------
def called(name: bytes, secrets: Sequence[bytes], rank: int, peer: int, patience: float) -> socket.socket | None:
    """A connection to `peer`, which has yet to answer; None where there is none."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        sock.settimeout(patience)
        sock.connect(address(name))
        if is_mine(sock):
            # As long as the longest packet: where the socket buffer is too small, there are no neighbours.
            sock.send(HELLO.pack(rank, token("call", secrets, rank, peer)).ljust(PACKET, b"\0"))
            return sock
    except OSError:  # no neighbour then: all ranks learn of it in the next all-gather
        pass
    sock.close()
    return None


def answered(sock: socket.socket, secrets: Sequence[bytes], rank: int, peer: int, until: float) -> bool:
    """Whether `peer` has accepted, by its token, before the time `until`."""
    try:
        sock.settimeout(max(until - time.monotonic(), 0.001))
        return hmac.compare_digest(sock.recv(HELLO.size), token("answer", secrets, rank, peer))
    except OSError:
        return False


# ---- the called end --------------------------------------------------------------------------------------------------
@dataclass
class Door:
    """The listening end. `listener` is None where none could be made; `calls` are connections with their HELLO."""

    listener: socket.socket | None
    calls: queue.SimpleQueue[tuple[socket.socket, bytes]] = field(default_factory=queue.SimpleQueue)

    def accepted(
        self, callers: Sequence[int], secrets: Sequence[bytes], rank: int, until: float
    ) -> dict[int, socket.socket]:
        """Connections of those of `callers` that have authenticated before the time `until`."""
        found: dict[int, socket.socket] = {}
        while len(found) < len(callers) and (left := until - time.monotonic()) > 0:
            try:
                sock, packet = self.calls.get(timeout=left)
            except queue.Empty:
                break
            peer, proof = HELLO.unpack(packet[: HELLO.size])
            fresh = peer in callers and peer not in found
            try:
                if fresh and hmac.compare_digest(proof, token("call", secrets, peer, rank)):
                    sock.send(token("answer", secrets, peer, rank))
                    found[peer] = sock
                    continue
            except OSError:  # it has left since
                pass
            sock.close()
        return found


@contextlib.contextmanager
def door(name: bytes, available: bool) -> Iterator[Door]:
    """A context in which connections are accepted. Those that were not taken are closed at its end."""
    listener = _listening(name) if available else None
    if listener is None:
        yield Door(None)
        return
    here, there = socket.socketpair()
    opened = Door(listener)
    thread = threading.Thread(target=_take, args=(listener, there, opened.calls), daemon=True, name="ringopt calls")
    thread.start()
    try:
        yield opened
    finally:
        here.close()
        thread.join()
        there.close()
        listener.close()
        while not opened.calls.empty():
            opened.calls.get()[0].close()


def _listening(name: bytes) -> socket.socket | None:
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:  # no error here: the peers would wait for an answer
        return None
    try:
        listener.setblocking(False)
        listener.bind(address(name))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        return None
    return listener


def _take(listener: socket.socket, end: socket.socket, calls: queue.SimpleQueue[tuple[socket.socket, bytes]]) -> None:
    """Accepts connections until the other side of `end` is closed, and queues those of this user that send a HELLO."""
    poll, silent = select.poll(), dict[int, socket.socket]()
    poll.register(listener, select.POLLIN)
    poll.register(end, select.POLLIN)
    try:
        while True:
            for number, _ in poll.poll():
                if number == end.fileno():
                    return
                if number == listener.fileno():
                    _admit(listener, poll, silent)
                elif number in silent:  # not closed since
                    _hear(silent, number, poll, calls)
    finally:
        for sock in silent.values():
            sock.close()


def _admit(listener: socket.socket, poll: select.poll, silent: dict[int, socket.socket]) -> None:
    sock = None
    with contextlib.suppress(OSError):  # closed again, or no file descriptor is left
        sock, _ = listener.accept()
    if len(silent) >= MOST_SILENT or (sock is None and silent):
        oldest = next(iter(silent))
        poll.unregister(oldest)
        silent.pop(oldest).close()
    if sock is None:
        time.sleep(PAUSE)
        return
    if not is_mine(sock):
        sock.close()
        return
    sock.setblocking(False)
    silent[sock.fileno()] = sock
    poll.register(sock, select.POLLIN)


def _hear(
    silent: dict[int, socket.socket],
    number: int,
    poll: select.poll,
    calls: queue.SimpleQueue[tuple[socket.socket, bytes]],
) -> None:
    try:
        packet = silent[number].recv(HELLO.size)
    except BlockingIOError:  # the descriptor of a closed connection has been reused by this one
        return
    except OSError:
        packet = b""
    poll.unregister(number)
    sock = silent.pop(number)
    if len(packet) == HELLO.size:
        calls.put((sock, packet))
    else:
        sock.close()
