"""Handles of asynchronous communication that one operator starts and another finishes.

    ticket = start(...)         posts messages, and returns a number in a tensor (int64 without dims, on the CPU)
    finish(ticket, ...)         takes over the messages in flight, by that number

In a graph the ticket is a value like any other: a compiler can neither reorder the two operators nor drop one of them.
An error between the two frees the ticket, after which nothing can finish the messages, which are in flight on every
rank all the same. They are waited for before the next are started.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ringopt.distributed.mesh import Mesh, Pending, registered
from ringopt.errors import RingMismatchError


@dataclass(frozen=True)
class Started:
    """`about` identifies what was started, for the finishing operator to compare; `state` is what that needs."""

    mesh: Mesh
    rank: int
    about: object
    state: Any
    pending: Sequence[Pending]
    ticket: StorageWeakRef


_started: dict[int, Started] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()  # the backward of an accelerator runs in a thread of the autograd engine


def issue(mesh: Mesh, about: object, state: Any, pending: Sequence[Pending]) -> Tensor:
    """A ticket for messages in flight on this rank of `mesh`."""
    ticket = torch.tensor(next(_numbers), device="cpu")
    entry = Started(mesh, mesh.rank, about, state, pending, StorageWeakRef(ticket.untyped_storage()))
    with _lock:
        _started[int(ticket)] = entry
    return ticket


def redeem(ticket: Tensor, about: object) -> Any:
    """The state that was issued with `ticket`, once. Raises RingMismatchError for a ticket that is unknown, used, or of
    another `about`: a compiler that did this would give wrong numbers."""
    with _lock:
        entry = _started.pop(int(ticket), None)
    if entry is None or entry.about != about:
        found = "nothing that is under way" if entry is None else entry.about
        raise RingMismatchError(f"ticket {int(ticket)} was given to {about}, and stands for {found}")
    return entry.state


def settle(mesh: Mesh) -> None:
    """Waits for messages of this rank of `mesh` whose tickets have been freed; called before new ones are started.
    Raises RingCommError."""
    rank = mesh.rank
    with _lock:
        lost = {number: entry for number, entry in _started.items() if _is_lost(entry, mesh, rank)}
        for number in lost:
            del _started[number]
    for entry in lost.values():
        if entry.mesh is mesh:
            for pending in entry.pending:
                pending.wait()


def _is_lost(entry: Started, mesh: Mesh, rank: int) -> bool:
    gone = registered(entry.mesh.name) is not entry.mesh  # its process group was destroyed
    return gone or (entry.mesh is mesh and entry.rank == rank and entry.ticket.expired())
