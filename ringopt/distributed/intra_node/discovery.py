"""Discovery of the ranks of one node that can read each other's memory."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import secrets
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ringopt.distributed.intra_node import process_vm
from ringopt.distributed.intra_node.calls import SECRET, answered, called, door, process_of
from ringopt.distributed.intra_node.messages import LocalLinks

BOOT = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
CARD = struct.Struct(f"<16s16s16s{SECRET}sQ")  # machine, place, name of the socket, secret, address of the secret
PATIENCE = 10.0  # seconds, for what a live peer does at once

# An all-gather of bytes, in rank order.
Gather: TypeAlias = Callable[[bytes], list[bytes]]


@dataclass(frozen=True)
class Met:
    """`links`: this rank's connections to its neighbours, if it has any. `everybody`: whether all ranks are neighbours
    of all others. `strangers`: ranks of its machine that are not."""

    links: LocalLinks | None
    everybody: bool
    strangers: tuple[int, ...] = ()


def find_neighbours(rank: int, gather: Gather, timeout: float) -> Met:
    """Finds the neighbours of this rank: those that can read its memory, and whose memory it can read.

    Collective over the ranks of a mesh. Ranks in other network namespaces count as other nodes, so that a link that was
    set up between them is used.
    """
    name, secret = uuid.uuid4().bytes, secrets.token_bytes(SECRET)
    proof = ctypes.create_string_buffer(secret, len(secret))
    if process_vm.available():
        process_vm.permit()
    with door(name, process_vm.available()) as entrance:
        mine = CARD.pack(_machine(), _place(), name, secret, ctypes.addressof(proof))
        machines, places, names, known, addresses = zip(*map(CARD.unpack, gather(mine)), strict=True)
        others = [peer for peer in range(len(places)) if peer != rank]
        here = [peer for peer in others if places[peer] == places[rank]]
        to = {peer: called(names[peer], known, rank, peer, PATIENCE) for peer in here if peer < rank}
        sockets = {peer: sock for peer, sock in to.items() if sock is not None}
        have_called = gather(bytes(peer in sockets for peer in range(len(places))))
        until = time.monotonic() + PATIENCE
        callers = [peer for peer in here if peer > rank and have_called[peer][rank]]
        from_others = entrance.accepted(callers, known, rank, until)
        for peer in list(sockets):
            if not answered(sockets[peer], known, rank, peer, until):
                sockets.pop(peer).close()
    sockets |= from_others
    processes = {peer: process_of(sock) for peer, sock in sockets.items()}
    can = [peer for peer in sockets if _reads(processes[peer], addresses[peer], known[peer])]
    could = gather(bytes(peer in can or peer == rank for peer in range(len(places))))
    peers = {peer: (sockets.pop(peer), processes[peer]) for peer in can if could[peer][rank]}
    for sock in sockets.values():
        sock.close()
    strangers = tuple(peer for peer in others if machines[peer] == machines[rank] and peer not in peers)
    return Met(LocalLinks(peers, timeout) if peers else None, all(map(all, could)), strangers)


def _machine() -> bytes:
    """Equal on two ranks of one machine, unique where that is not known."""
    try:
        return hashlib.blake2b(BOOT.read_bytes(), digest_size=16).digest()
    except OSError:
        return uuid.uuid4().bytes


def _place() -> bytes:
    """Equal on two ranks that can be neighbours: of one machine, network namespace and user; else unique."""
    try:
        place = f"{BOOT.read_text()} {os.readlink(NETWORK)} {os.getuid()}"
    except OSError:
        return uuid.uuid4().bytes
    return hashlib.blake2b(place.encode(), digest_size=16).digest() if process_vm.available() else uuid.uuid4().bytes


def _reads(process: int, address: int, secret: bytes) -> bool:
    found = ctypes.create_string_buffer(len(secret))
    try:
        process_vm.read_memory(process, address, ctypes.addressof(found), len(secret))
    except OSError:
        return False
    return hmac.compare_digest(found.raw, secret)
