"""Ranks on one node find each other, and see whether they can read each other's memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ringopt.distributed.intra_node import process_vm
from ringopt.distributed.intra_node.messages import PACKET, LocalLinks

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
CARD = struct.Struct("<16s16s16sQ")  # machine, place, name, address of the name
CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
PATIENCE = 10.0  # seconds, for what a peer that is there does at once

# What every rank brings, in rank order.
Gather: TypeAlias = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Met:
    """`links`: this rank's connections to its neighbours, if it has any. `everybody`: all ranks are each other's.
    `strangers`: ranks on its machine that are none."""

    links: LocalLinks | None
    everybody: bool
    strangers: tuple[int, ...] = ()


def meet(rank: int, gather: Gather, timeout: float) -> Met:
    """Finds the neighbours of this rank: those that can read its memory, and it theirs.

    All ranks of a mesh come here together; each two are neighbours or not whatever others are. Ranks in other network
    namespaces are taken to be elsewhere: a link that somebody has put between them is used.
    """
    name = uuid.uuid4().bytes
    proof = ctypes.create_string_buffer(name, len(name))
    if process_vm.available():
        process_vm.permit()
    with _listening(name) as listener:
        cards = [CARD.unpack(card) for card in gather(CARD.pack(_machine(), _place(), name, ctypes.addressof(proof)))]
        others = [peer for peer in range(len(cards)) if peer != rank]
        machines, places, names, addresses = zip(*cards, strict=True)
        here = [peer for peer in others if places[peer] == places[rank]]
        sockets = {peer: sock for peer in here if peer < rank and (sock := _connected(names[peer], rank))}
        called = gather(bytes(peer in sockets for peer in range(len(cards))))
        sockets |= _accepted(listener, [peer for peer in here if peer > rank and called[peer][rank]])
    processes = {peer: _process(sock) for peer, sock in sockets.items()}
    can = [peer for peer in sockets if _reads(processes[peer], addresses[peer], names[peer])]
    could = gather(bytes(peer in can or peer == rank for peer in range(len(cards))))
    peers = {peer: (sockets.pop(peer), processes[peer]) for peer in can if could[peer][rank]}
    for sock in sockets.values():
        sock.close()
    strangers = tuple(peer for peer in others if machines[peer] == machines[rank] and peer not in peers)
    return Met(LocalLinks(peers, timeout) if peers else None, all(map(all, could)), strangers)


def _machine() -> bytes:
    """The same on two ranks of one machine, where that can be told."""
    try:
        return hashlib.blake2b(BOOT.read_bytes(), digest_size=16).digest()
    except OSError:
        return uuid.uuid4().bytes


def _place() -> bytes:
    """The same on two ranks that can meet: one machine, network namespace and user. Nowhere, where none can."""
    try:
        told = f"{BOOT.read_text()} {os.readlink(NETWORK)} {os.getuid()}"
    except OSError:
        return uuid.uuid4().bytes
    return hashlib.blake2b(told.encode(), digest_size=16).digest() if process_vm.available() else uuid.uuid4().bytes


def _address(name: bytes) -> bytes:
    return b"\0ringopt-" + name.hex().encode()  # abstract: there is no file, and nothing is left behind


@contextmanager
def _listening(name: bytes) -> Iterator[socket.socket | None]:
    """None where nobody can call."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) if process_vm.available() else None
        if listener is not None:
            listener.settimeout(PATIENCE)
            listener.bind(_address(name))
            listener.listen(socket.SOMAXCONN)
    except OSError:  # the peers must not wait for an answer that an error keeps back
        listener = None
    with listener or nullcontext():
        yield listener


def _connected(name: bytes, rank: int) -> socket.socket | None:
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None
    try:
        sock.settimeout(PATIENCE)
        sock.connect(_address(name))
        # As long as the longest packet: where a socket does not hold that, nobody is a neighbour.
        sock.send(struct.pack("<Q", rank).ljust(PACKET, b"\0"))
    except OSError:
        sock.close()
        return None
    return sock


def _accepted(listener: socket.socket | None, callers: list[int]) -> dict[int, socket.socket]:
    """Those of `callers` who have called."""
    found: dict[int, socket.socket] = {}
    if listener is None:
        return found
    for _ in callers:
        try:
            sock, _ = listener.accept()
            sock.settimeout(PATIENCE)
            (peer,) = struct.unpack("<Q", sock.recv(8))
        except (OSError, struct.error):  # no neighbour then: all ranks hear of it in what is gathered last
            continue
        found[peer] = sock
    return {peer: sock for peer, sock in found.items() if peer in callers}


def _process(sock: socket.socket) -> int:
    """The number of the process at the other end, as seen from here: it may have another in its own namespace."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, _user, _group = CREDENTIALS.unpack(credentials)
    return int(process)


def _reads(process: int, address: int, name: bytes) -> bool:
    found = ctypes.create_string_buffer(len(name))
    try:
        process_vm.read(process, address, ctypes.addressof(found), len(name))
    except OSError:
        return False
    return found.raw == name
