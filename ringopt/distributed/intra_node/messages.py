"""Messages between ranks of one node, without a network and without threads.

A sender offers a message over a Unix socket: its address and length. The receiver copies it from there (process_vm.py),
once, and acknowledges; a short message is part of the offer itself. Compared with TCP over loopback this saves two
copies, and the threads that make them, which on a busy node compete for the cores with the computation.

Bytes move when a rank posts, waits, or serves its messages between two blocks of computation. Waiting for one message
serves all others too, so that no order of waits can deadlock. A send is complete when nothing is left to do for it on
this rank, so that after a wait it may compute for any time without serving messages.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias
from weakref import WeakSet

from torch import Tensor

from ringopt.distributed.intra_node import process_vm

# A message up to this size is part of its offer: one more copy, and its sender need not wait for the receiver.
SHORT = 1 << 14  # bytes
# Of two waiting threads one may serve what the other waits for: none sleeps longer than this.
SLICE = 0.05  # seconds
# Time in which the process was stopped (a suspended job, a debugger) is no waiting: one poll counts for this at most.
LOOK = 1.0  # seconds

Key: TypeAlias = tuple[int, int]  # stream, number within it


class Kind(IntEnum):
    """OFFER: a message in the sender's memory; SHORT: one within the packet; TAKEN: an acknowledgement."""

    OFFER = 0
    SHORT = 1
    TAKEN = 2


HEAD = struct.Struct("<BBQQQ")  # kind, stream, number, address, bytes
PACKET = HEAD.size + SHORT  # bytes at most


@dataclass
class End:
    """One end of a message. `error`: why it failed, or ""."""

    links: LocalLinks
    line: Line
    done: bool = False
    error: str = ""

    def wait(self) -> None:
        """Waits until it is done. Raises RuntimeError."""
        self.links.wait([self])


@dataclass
class Offer:
    """A message that a peer has offered: in its memory, or in `content` if it is short."""

    line: Line
    key: Key
    size: int
    address: int
    content: bytes | None

    def read(self, target: Tensor, start: int = 0) -> None:
        """Fills `target`, contiguous, with the bytes from `start` on. Raises OSError."""
        if self.content is not None:
            ctypes.memmove(target.data_ptr(), self.content[start : start + target.nbytes], target.nbytes)
        else:
            process_vm.read_memory(self.line.process, self.address + start, target.data_ptr(), target.nbytes)


@dataclass(eq=False)
class Line:
    """The socket to a peer, with offers and receives that are not matched yet."""

    peer: int
    process: int  # its process id as seen from here
    socket: socket.socket
    gone: bool = False
    sent: int = 0
    received: int = 0
    # Packets that did not fit into the socket, each with the end that is done when it is sent.
    unsent: deque[tuple[bytes, End | None]] = field(default_factory=deque)
    offers: dict[Key, Offer] = field(default_factory=dict)
    awaited: dict[Key, Callable[[Offer], None]] = field(default_factory=dict)
    untaken: dict[Key, tuple[End, Tensor]] = field(default_factory=dict)  # with the buffer that the peer reads

    def is_cut(self) -> bool:
        """Whether the peer has closed the connection, even if packets are still to be read."""
        poll = select.poll()
        poll.register(self.socket, 0)
        return bool(poll.poll(0))


class LocalLinks:
    """This rank's connections to others of its node: the socket to each peer, and its process id. Waiting for one
    message fails after `timeout` seconds."""

    MESSAGES = 0  # the stream of point-to-point messages; others are for the collectives

    def __init__(self, peers: Mapping[int, tuple[socket.socket, int]], timeout: float):
        self.lines = {peer: Line(peer, process, sock) for peer, (sock, process) in sorted(peers.items())}
        self._timeout = timeout
        # Reentrant: a received message may be the last part of a sum, which is then sent.
        self.lock = threading.RLock()
        self._turn = threading.Lock()  # a poll object serves one thread at a time
        self._poll, self._by_number = select.poll(), dict[int, Line]()
        for line in self.lines.values():
            line.socket.setblocking(False)
            self._by_number[line.socket.fileno()] = line
            self._poll.register(line.socket, select.POLLIN)
        _open.add(self)

    def close(self) -> None:
        for line in self.lines.values():
            line.socket.close()

    def fail(self) -> None:
        """Shuts all connections down: after an error this rank is out of step, and no peer may receive another message
        from it. Peers that wait for this rank fail at once."""
        with self.lock:
            for line in self.lines.values():
                with suppress(OSError):  # the peer is gone
                    line.socket.shutdown(socket.SHUT_RDWR)

    def send(self, peer: int, buffer: Tensor) -> End:
        """Starts sending `buffer`, contiguous, which must not be written before it was waited for. The n-th message to
        a peer is the n-th that it receives from this rank."""
        with self.lock:
            line = self.lines[peer]
            line.sent += 1
            return self.offer(line, buffer, (self.MESSAGES, line.sent))

    def receive(self, peer: int, buffer: Tensor) -> End:
        with self.lock:
            line = self.lines[peer]
            line.received += 1
            return self.accept(line, buffer, (self.MESSAGES, line.received))

    def attend(self) -> None:
        """Serves messages without blocking."""
        if self.busy:
            self._serve(0.0)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """A context for a thread that blocks in another transport: a thread serves messages meanwhile."""
        over = threading.Event()

        def serve() -> None:
            while self.busy and not over.is_set():
                self._serve(SLICE)

        if self.busy:
            threading.Thread(target=serve, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    @property
    def busy(self) -> bool:
        """Whether a message is in flight that needs this rank."""
        return any(line.awaited or line.untaken or line.unsent for line in self.lines.values())

    def wait(self, ends: Sequence[End]) -> None:
        """Serves all messages until `ends` are done. Raises RuntimeError as soon as one of them has failed or its peer
        is gone, since others may depend on it."""
        patience = self._timeout
        while True:
            for end in ends:
                if end.line.gone and not end.done:  # in this order: another thread may serve its last message
                    raise RuntimeError(_closed(end.line))
                if end.error:
                    raise RuntimeError(end.error)
            waited_for = next((end.line.peer for end in ends if not end.done), None)
            if waited_for is None:
                return
            if patience <= 0:
                raise RuntimeError(f"Timed out waiting {self._timeout * 1000:.0f}ms for rank {waited_for}")
            begin = time.monotonic()
            self._serve(min(patience, SLICE))
            patience -= min(time.monotonic() - begin, LOOK)

    # ---- the two ends of a message; under the lock -------------------------------------------------------------------
    def offer(self, line: Line, buffer: Tensor, key: Key) -> End:
        end, size = End(self, line), buffer.nbytes
        if size <= SHORT:
            self._push(line, HEAD.pack(Kind.SHORT, *key, 0, size) + ctypes.string_at(buffer.data_ptr(), size), end)
        else:
            line.untaken[key] = end, buffer
            self._push(line, HEAD.pack(Kind.OFFER, *key, buffer.data_ptr(), size))
        return end

    def accept(self, line: Line, buffer: Tensor, key: Key) -> End:
        end = End(self, line)

        def take(offer: Offer) -> None:
            end.error = self.take(offer, [(0, buffer)], buffer.nbytes)
            self.taken(offer, end)

        self.expect(line, key, take)
        return end

    def expect(self, line: Line, key: Key, take: Callable[[Offer], None]) -> None:
        """Calls `take` with the message `key`, now or as soon as it is offered."""
        line.awaited[key] = take
        if key in line.offers:
            self._bring_together(line.offers.pop(key))

    def take(self, offer: Offer, pieces: Iterable[tuple[int, Tensor]], size: int) -> str:
        """Reads a message of `size` bytes into `pieces`, (offset in bytes, buffer) each. Returns the error, or ""."""
        if offer.size != size:
            return f"rank {offer.line.peer} has sent {offer.size} bytes where {size} are received"
        try:
            for start, target in pieces:
                offer.read(target, start)
        except OSError as problem:
            return str(problem)
        # A peer closes its connection before it frees the memory of its messages: these bytes may be others.
        return _closed(offer.line) if offer.content is None and offer.line.is_cut() else ""

    def taken(self, offer: Offer, end: End | None = None) -> None:
        """Acknowledges a message to its sender, whether it could be read or not, which completes `end`."""
        if offer.content is None:
            self._push(offer.line, HEAD.pack(Kind.TAKEN, *offer.key, 0, 0), end)
        elif end is not None:
            end.done = True

    def _bring_together(self, offer: Offer) -> None:
        take = offer.line.awaited.pop(offer.key, None)
        if take is None:
            offer.line.offers[offer.key] = offer
        else:
            take(offer)

    # ---- sockets -----------------------------------------------------------------------------------------------------
    def _serve(self, seconds: float) -> None:
        if not self._turn.acquire(timeout=seconds):
            return
        try:
            ready = self._poll.poll(seconds * 1000)  # without the lock: another thread may have to post
        finally:
            self._turn.release()
        with self.lock:
            try:
                for number, _ in ready:
                    line = self._by_number[number]
                    self._flush(line)
                    while not line.gone and self._next_packet(line):
                        pass
            except BaseException:  # such as out of memory: the current message is lost, and peers would wait for it
                self.fail()
                raise

    def _next_packet(self, line: Line) -> bool:
        try:
            packet = line.socket.recv(PACKET)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # raised once, before the packets that the peer sent
            return True
        if not packet:
            line.gone = True
            self._poll.unregister(line.socket)
            return False
        kind, stream, number, address, size = HEAD.unpack_from(packet)
        if kind == Kind.TAKEN:
            end, _ = line.untaken.pop((stream, number))
            end.done = True
        else:
            content = packet[HEAD.size :] if kind == Kind.SHORT else None
            self._bring_together(Offer(line, (stream, number), size, address, content))
        return True

    def _push(self, line: Line, packet: bytes, end: End | None = None) -> None:
        line.unsent.append((packet, end))
        self._flush(line)

    def _flush(self, line: Line) -> None:
        while line.unsent and not line.gone:
            packet, end = line.unsent[0]
            try:
                line.socket.send(packet, socket.MSG_NOSIGNAL)  # a peer may be gone, and SIGPIPE would end the program
            except BlockingIOError:  # the peer computes, and the socket buffer is full
                break
            except ConnectionError:  # the peer is gone; packets of it may still be unread
                line.unsent.clear()
                break
            line.unsent.popleft()
            if end is not None:
                end.done = True
        if not line.gone:
            self._poll.modify(line.socket, select.POLLIN | (select.POLLOUT if line.unsent else 0))


def _closed(line: Line) -> str:
    return f"Connection closed by rank {line.peer}, process {line.process}"


_open: WeakSet[LocalLinks] = WeakSet()


def _close_all() -> None:
    for links in _open:
        links.close()


# A process that a rank forks (a worker of a DataLoader) is no rank. As long as it had the sockets, nobody could see
# that the rank is gone.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
