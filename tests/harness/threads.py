"""p ranks as threads of one process, over a mesh that refuses what a real group would hang on or corrupt.

    results = run_on_threads(4, lambda mesh: body(mesh.rank, mesh.name))

On the CPU the autograd engine runs a backward in the thread that called it, so a rank's backward meets the others' in
the same way as its forward. What is checked, because a real group would not:
* both ends of a message have the same dtype and length, and all messages are received;
* a buffer under way is neither changed by its sender nor read by its receiver (it holds NaN until it has arrived);
* no rank waits for a message that nobody sends;
* all ranks enter the same collective with the same shape and dtype.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh, Transfer, register

T = TypeVar("T")

TIMEOUT = 20.0


class ThreadsError(AssertionError):
    """What a real group would hang on or corrupt. No RuntimeError: those are taken for errors of the transport."""


class Stopped(BaseException):
    """Another rank failed; its error is the one to report."""


@dataclass
class End:
    """One end of a message: a buffer that was posted by a sender or a receiver."""

    rank: int
    peer: int
    buffer: Tensor
    label: str
    posted: Tensor | None = None  # what a sender's buffer held then
    met: threading.Event = field(default_factory=threading.Event)

    def __str__(self) -> str:
        return f"{self.label!r} {list(self.buffer.shape)} {self.buffer.dtype}"


class ThreadMesh(Mesh):
    def __init__(self, size: int, name: str = "threads"):
        self._local = threading.local()
        super().__init__()
        self._name, self._size = name, size
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._slots: list[Any] = [None] * size
        self._sends: dict[tuple[int, int], deque[End]] = {}
        self._receives: dict[tuple[int, int], deque[End]] = {}
        self._started: dict[int, dict[int, tuple[str, Tensor]]] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._local.rank

    @property
    def size(self) -> int:
        return self._size

    @property  # of each rank: a process has a mesh of its own
    def seeds_arriving(self) -> Callable[[], list[Tensor]] | None:  # type: ignore[override]
        return getattr(self._local, "seeds", None)

    @seeds_arriving.setter
    def seeds_arriving(self, value: Callable[[], list[Tensor]] | None) -> None:
        self._local.seeds = value

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        transfers = []
        for peer, buffer in receives:
            poison(buffer)
            end = End(self.rank, peer, buffer, label)
            self._meet(end, self._sends, self._receives, (peer, self.rank))
            transfers.append(Transfer(f"receive from rank {peer}", Receive(self, end)))
        for peer, buffer in sends:
            end = End(self.rank, peer, buffer, label, buffer.clone())
            self._meet(end, self._receives, self._sends, (self.rank, peer))
            transfers.append(Transfer(f"send to rank {peer}", Send(self, end)))
        return transfers

    def _meet(self, end: End, theirs: Any, mine: Any, channel: tuple[int, int]) -> None:
        """Leaves `end` for the other side, or joins it with what the other side left first."""
        with self._lock:
            waiting = theirs.setdefault(channel, deque())
            if not waiting:
                mine.setdefault(channel, deque()).append(end)
                return
            other = waiting.popleft()
        if (other.buffer.dtype, other.buffer.shape, other.label) != (end.buffer.dtype, end.buffer.shape, end.label):
            raise ThreadsError(f"rank {end.rank} posts {end}, and rank {other.rank} has posted {other} for it")
        source, target = (end, other) if end.posted is not None else (other, end)
        target.posted = source.posted
        source.met.set()
        target.met.set()

    def wait_for(self, end: End) -> None:
        waited = 0.0
        while not end.met.wait(0.02):
            waited += 0.02
            if self._failed.is_set():
                raise Stopped
            if waited > TIMEOUT:
                raise ThreadsError(f"rank {end.rank} waits for rank {end.peer} in {end}, which never comes")

    def parts_of(self, number: int) -> list[Tensor]:
        """What all ranks brought to a collective that was started, in rank order."""
        waited = 0.0
        while len(self._started[number]) < self.size:
            time.sleep(0.005)
            waited += 0.005
            if self._failed.is_set():
                raise Stopped
            if waited > TIMEOUT:
                raise ThreadsError(f"rank {self.rank} waits in collective {number}, which not all ranks start")
        brought = [self._started[number][rank] for rank in range(self.size)]
        if len({(kind, part.shape, part.dtype) for kind, part in brought}) > 1:
            raise ThreadsError(f"the ranks started different collectives: {brought}")
        return [part for _kind, part in brought]

    # ---- collectives -------------------------------------------------------------------------------------------------
    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        return [part.clone() for part in self._together("all_gather", x)]

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return torch.stack(self._together("all_reduce", x)).sum(0, dtype=x.dtype)

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        number = self._start("all_reduce", x)
        poison(x)
        return Transfer(f"all_reduce {number}", Reduce(self, number, x))

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        number, parts = self._start("all_gather", x), [torch.empty_like(x) for _ in range(self.size)]
        for part in parts:
            poison(part)
        return parts, Transfer(f"all_gather {number}", Gather(self, number, x, x.clone(), parts))

    def _start(self, kind: str, x: Tensor) -> int:
        """The n-th on this rank meets the n-th on all others, whatever else is done meanwhile."""
        number = self._local.started = getattr(self._local, "started", 0) + 1
        with self._lock:
            self._started.setdefault(number, {})[self.rank] = kind, x.detach().clone()
        return number

    def _together(self, kind: str, x: Tensor) -> list[Tensor]:
        """What every rank brought to this collective, in rank order."""
        ticket = (kind, tuple(x.shape), x.dtype)
        self._slots[self.rank] = (ticket, x.detach().clone())
        self._gather_round(kind)
        brought = list(self._slots)
        self._gather_round(kind)  # nobody may overwrite a slot before all have read
        tickets = [ticket for ticket, _ in brought]
        if len(set(tickets)) > 1:
            raise ThreadsError(f"the ranks entered different collectives: {tickets}")
        return [tensor for _, tensor in brought]

    def _gather_round(self, kind: str) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            if self._failed.is_set():
                raise Stopped from None
            raise ThreadsError(f"rank {self.rank} waits in {kind}, which not all ranks enter") from None

    # ---- what the test calls -----------------------------------------------------------------------------------------
    def run(self, body: Callable[[ThreadMesh], T]) -> list[T]:
        errors: list[BaseException] = []

        def as_rank(rank: int) -> T | None:
            self._local.rank = rank
            try:
                return body(self)
            except Stopped:
                return None
            except BaseException as error:
                errors.append(error)
                self._failed.set()
                self._barrier.abort()
                return None

        with ThreadPoolExecutor(self._size) as pool:
            results = list(pool.map(as_rank, range(self._size)))
        if errors:
            raise errors[0]
        left = [str(end) for book in (self._sends, self._receives) for ends in book.values() for end in ends]
        if left or self.in_flight:
            waits = [pending.label for pending in self.in_flight]
            raise ThreadsError(f"messages with no other end: {left}; exchanges nobody waited for: {waits}")
        return results  # type: ignore[return-value]


@dataclass
class Send:
    mesh: ThreadMesh
    end: End

    def wait(self) -> None:
        self.mesh.wait_for(self.end)
        assert self.end.posted is not None
        if not same_bytes(self.end.buffer, self.end.posted):
            raise ThreadsError(f"rank {self.end.rank} changed the buffer of {self.end} while it was being sent")


@dataclass
class Receive:
    mesh: ThreadMesh
    end: End

    def wait(self) -> None:
        self.mesh.wait_for(self.end)
        assert self.end.posted is not None
        self.end.buffer.copy_(self.end.posted)


@dataclass
class Reduce:
    mesh: ThreadMesh
    number: int
    buffer: Tensor

    def wait(self) -> None:
        parts = self.mesh.parts_of(self.number)
        self.buffer.copy_(torch.stack(parts).sum(0, dtype=self.buffer.dtype))


@dataclass
class Gather:
    """`given` is what was in `buffer` when it was started."""

    mesh: ThreadMesh
    number: int
    buffer: Tensor
    given: Tensor
    parts: list[Tensor]

    def wait(self) -> None:
        if not same_bytes(self.buffer, self.given):
            raise ThreadsError(f"rank {self.mesh.rank} changed what it gives to all_gather {self.number}")
        for part, brought in zip(self.parts, self.mesh.parts_of(self.number), strict=True):
            part.copy_(brought)


def poison(buffer: Tensor) -> None:
    buffer.fill_(float("nan") if buffer.is_floating_point() else 77)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def calls_of(patch: pytest.MonkeyPatch, methods: Mapping[type, Sequence[str]]) -> list[str]:
    """The names of these methods, as they are called from now on."""
    called: list[str] = []
    for owner, name in ((owner, name) for owner, names in methods.items() for name in names):
        original = getattr(owner, name)

        def noted(*given: Any, _name: str = name, _original: Any = original) -> Any:
            called.append(_name)
            return _original(*given)

        patch.setattr(owner, name, noted)
    return called


def run_on_threads(p: int, body: Callable[[ThreadMesh], T]) -> list[T]:
    """`[body(mesh) on each rank]`; the mesh is registered as mesh.name. Raises the error that came first."""
    mesh = ThreadMesh(p)
    register(mesh)
    return mesh.run(body)
