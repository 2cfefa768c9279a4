"""The communicator of the ranks that share one sequence: point-to-point messages, all-gather, all-reduce.

A mesh is looked up by name when an operator runs, so that the graph that calls it is the same on every rank. `Mesh` is
the interface, `PretendedMesh` has no processes, for dry runs; the one over a process group is in process.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringopt.distributed.standing import Call, Recent
from ringopt.distributed.traffic import log_event, mark, this_site, working_for
from ringopt.errors import RingCommError, RingError, first_line
from ringopt.torch_compat.autograd import StopRecomputationError

# The label of "computed" events for what no operator of ringopt computed.
PROGRAM = "the program"

ADVICE = (
    "A peer died, hung, or did not make the same call; look at the output of the other ranks. The process group cannot "
    "be used any more: restart the ranks"
)


class Work(Protocol):
    """What a transport returns for a message in flight. The return value of `wait` is ignored."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Transfer:
    """One message in flight (several, where the transport waits for them together); `what` describes it in errors."""

    what: str
    work: Work


class Pending:
    """Messages in flight. Their buffers must not be freed, written (send) or read (receive) before `wait` has
    returned."""

    def __init__(self, mesh: Mesh, buffers: Sequence[Tensor], label: str):
        self.label, self.site = label, this_site()
        self._mesh, self._buffers = mesh, list(buffers)
        self._transfers: list[Transfer] = []
        self._begin = time.monotonic()

    def under_way(self, transfers: Sequence[Transfer]) -> None:
        self._transfers.extend(transfers)

    def wait(self) -> None:
        """Blocks until every message has arrived or left. Raises RingCommError, with the transport's error as cause.

        A second call returns at once: waiting twice for a work of gloo blocks until the timeout.
        """
        began = mark()
        if self._transfers:
            self._mesh.recent.note("waits", self.label)
        while self._transfers:
            transfer = self._transfers.pop(0)
            try:
                transfer.work.wait()
            except RuntimeError as error:
                raise self._mesh.failed(self.label, transfer.what, self._begin, error) from error
        if self._buffers:
            self._buffers.clear()
            self._mesh.in_flight.discard(self)
            self._mesh.recent.note("waited", self.label)
            with working_for(self.site):
                log_event("waited", self.label, self._mesh.rank, began=began)


class Mesh(ABC):
    """`size` ranks, of which this is `rank`. `device` is that of small control messages."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        # After an error no one waits for these any more, and yet the transport may still write into their buffers.
        self.in_flight: set[Pending] = set()
        self.recent = Recent()
        # Of this thread: whether it is within a program, and what is due before its next message.
        self._within = threading.local()
        # Seeds on their way to the host, of all ranks, to be compared there (ops/ring_misfits.py).
        self.seeds_arriving: Callable[[], list[Tensor]] | None = None
        # Backwards of autograd that have begun the backward of a program and are not over (runtime/input_check.py).
        self.backwards: set[int] = set()

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def logging_rank(self) -> int:
        """The rank under which events are recorded."""
        return self.rank

    @property
    def gathers_in_place(self) -> bool:
        """Whether all-gathers in CPU memory need no staging buffer of the transport."""
        return False

    @property
    def remark(self) -> str:
        """A remark on the transport for reports, or ""."""
        return ""

    def apart(self) -> Mesh:
        """A mesh of the same ranks with a message order of its own: for checks that a rank may skip by mistake. Where
        that takes a new process group, the first call is collective."""
        return self

    def meet_on(self, device: torch.device) -> None:  # noqa: B027 (most meshes are of one process)
        """Before messages of tensors on `device`, the rank's own: all ranks meet there once. Collective, the first time
        for a device; small messages are from there too, where the transport has none from the host."""

    def failed(self, label: str, what: str, begin: float, error: RuntimeError) -> RingCommError:
        """The error to raise for a failed message: what was done, for how long since `begin`, and the transport's
        error."""
        cause = first_line(error).rstrip(".")
        return RingCommError(
            f"rank {self.rank} of {self.size} ({self.name}), {label or 'exchange'}: {what} failed after "
            f"{time.monotonic() - begin:.1f} s: {cause}. {ADVICE}"
        )

    def held(self) -> AbstractContextManager[None]:
        """A context for communication: this thread is inside the mesh, and no other may be. Raises RingThreadError."""
        return nullcontext()  # most meshes are pretended

    def stands(self, call: Call, publish: bool = False) -> None:
        """Records which call this rank is in; `publish`: for the other ranks to read, too."""
        self.recent.call = call

    def begin_program(self) -> None:  # noqa: B027 (what counts them is who may be cut short)
        """Counts one more program with communication that this rank takes part in."""

    def cut_short(self, why: str, kind: str, later: bool = False) -> None:  # noqa: B027 (most meshes are of one process)
        """This rank has left a program by an error of type `kind`; "" for interrupts, which may come anywhere and leave
        anything half done. `later`: noticed at the next call."""

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """A context for a program with communication. An error within may be of this rank alone (an index out of range
        in its shard, out of memory): its peers then wait for a message that never comes, and another call would send
        them the wrong one. So the mesh is aborted, unless all ranks failed at the same message; at once after an
        interrupt. Errors of ringopt are raised on all ranks alike, or have aborted it already; so is the exception by
        which a checkpoint stops its recomputation."""
        within, self._within.program = getattr(self._within, "program", False), True
        try:
            with self.held():
                if not within:
                    self.begin_program()
                yield
                if not within:
                    self.settle()
        except (RingError, StopRecomputationError):
            self.settle()  # which all ranks have begun
            raise
        except BaseException as error:
            if not within:  # else the outer program handles it
                kind = type(error).__name__
                why = f"an earlier call was cut short by {kind}: {first_line(error)}"
                self.cut_short(why, kind if isinstance(error, Exception) else "")
            raise
        finally:
            self._within.program = within
            if not within:
                self._within.due = None

    def due_before_message(self, settle: Callable[[], None]) -> None:
        """`settle` is called before the next message of this thread, or at the end of the program that it is in. It
        may raise errors of ringopt, on all ranks alike."""
        self._within.due = settle

    def settle(self) -> None:
        due, self._within.due = getattr(self._within, "due", None), None
        if due is not None:
            due()

    def attend(self) -> None:  # noqa: B027 (most transports have threads)
        """Serves messages that have arrived. Long computations call it now and then, for transports without threads."""

    def exchange(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str = ""
    ) -> Pending:
        """Starts messages to and from other ranks; (peer, 1-D contiguous buffer) each.

        Both ends of a message must have the same number of bytes, and two messages between the same two ranks the same
        order. All receives are posted before any send: gloo writes a send at once, and until its peer has posted the
        receive the two directions of a link run one after the other, at half the rate.
        """
        for peer, buffer in (*sends, *receives):
            if not 0 <= peer < self.size or peer == self.rank:
                raise ValueError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {peer}")
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise ValueError(
                    f"a message is one 1-D contiguous buffer; found {list(buffer.shape)} with strides {buffer.stride()}"
                )
        # Empty on both ends alike, so nobody waits for them.
        sends = [(peer, buffer) for peer, buffer in sends if buffer.numel()]
        receives = [(peer, buffer) for peer, buffer in receives if buffer.numel()]
        sent, received = (sum(buffer.nbytes for _, buffer in way) for way in (sends, receives))
        pending = Pending(self, [buffer for _, buffer in (*sends, *receives)], label)
        if sends or receives:
            with self.held():
                self.settle()
                self.recent.note("posted", label, [peer for peer, _ in (*sends, *receives)], sent)
                log_event("posted", label, self.rank, sent, received, len(sends))
                self.in_flight.add(pending)
                pending.under_way(self._post(sends, receives, label))
        return pending

    def all_gather(self, x: Tensor, label: str = "") -> list[Tensor]:
        """`x` of every rank, in rank order: new tensors, of one shape and dtype on all ranks."""
        if self.size == 1:
            return [x.clone()]
        moved = x.nbytes * (self.size - 1)
        with self.held():
            self.settle()
            self.recent.note("all_gather", label, sent=moved)
            began, gathered = mark(), self._all_gather(x, label)
        self.recent.note("done", label)
        log_event("all_gather", label, self.rank, moved, moved, self.size - 1, began=began)
        return gathered

    def all_reduce(self, x: Tensor, label: str = "") -> Tensor:
        """The sum of `x` over the ranks: a new contiguous tensor, the same bits on all of them."""
        if self.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        moved = 2 * x.nbytes * (self.size - 1) // self.size
        with self.held():
            self.settle()
            self.recent.note("all_reduce", label, sent=moved)
            began, total = mark(), self._all_reduce(x, label)
        self.recent.note("done", label)
        log_event("all_reduce", label, self.rank, moved, moved, 2 * (self.size - 1), began=began)
        return total

    def start_all_reduce(self, x: Tensor, label: str = "") -> Pending:
        """As `all_reduce`, in place and asynchronous: `x`, contiguous, holds the sum when `wait` has returned. All
        ranks start their collectives in the same order."""
        pending = Pending(self, [x], label)
        if self.size > 1 and x.numel():
            moved = 2 * x.nbytes * (self.size - 1) // self.size
            with self.held():
                self.settle()
                self.recent.note("posted", label, "all", moved)
                log_event("posted", label, self.rank, moved, moved, 2 * (self.size - 1))
                self.in_flight.add(pending)
                pending.under_way([self._start_all_reduce(x, label)])
        return pending

    def start_all_gather(self, x: Tensor, label: str = "") -> tuple[list[Tensor], Pending]:
        """As `all_gather`, asynchronous: the tensors, in rank order, are filled when `wait` has returned. `x` must not
        be written before. All ranks start their collectives in the same order."""
        if self.size == 1 or not x.numel():
            return [x.clone() for _ in range(self.size)], Pending(self, [], label)
        moved = x.nbytes * (self.size - 1)
        with self.held():
            self.settle()
            self.recent.note("posted", label, "all", moved)
            log_event("posted", label, self.rank, moved, moved, self.size - 1)
            parts, transfer = self._start_all_gather(x, label)
            pending = Pending(self, [x, *parts], label)
            self.in_flight.add(pending)
            pending.under_way([transfer])
        return parts, pending

    @abstractmethod
    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]: ...

    @abstractmethod
    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor, label: str) -> Tensor: ...

    @abstractmethod
    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer: ...

    @abstractmethod
    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]: ...


class PretendedMesh(Mesh):
    """A mesh without processes, which knows its rank and size only: for plans, reports and graphs. `hardware` (a name
    of ringopt/hardware/devices.py) is the assumed device of the ranks; None: as this machine."""

    def __init__(self, rank: int, size: int, hardware: str | None = None):
        super().__init__()
        self._rank, self._size, self.hardware = rank, size, hardware

    @property
    def name(self) -> str:
        return f"pretend:{self._rank}/{self._size}"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def _refuse(self) -> RingCommError:
        return RingCommError(
            f"rank {self._rank} of {self._size} is pretended, and a message was to be sent: what is made for a "
            "pretended rank can be looked at, not run. Start the ranks with torchrun"
        )

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        raise self._refuse()

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        raise self._refuse()

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        raise self._refuse()

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        raise self._refuse()

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        raise self._refuse()


_meshes: dict[str, Mesh] = {}

# The name in programs for any number of ranks: the world that runs them, or one process alone.
ANY = "any"


def register(mesh: Mesh) -> None:
    """Makes `mesh` the one that `mesh_of(mesh.name)` returns from now on."""
    _meshes[mesh.name] = mesh


def registered(name: str) -> Mesh | None:
    """The mesh registered as `name`, or None."""
    return _meshes.get(name)


def forget_all() -> None:
    """Drops every mesh, and the buffers of messages that were not waited for. For when process groups are destroyed."""
    _meshes.clear()


def known() -> list[str]:
    """The names of all registered meshes."""
    return sorted(_meshes)


def program_until_here(mesh: Mesh) -> None:
    """Logs that the program computed until now. Operators that find messages in flight call it first; else the time of
    what runs before them would count as that of their first block."""
    log_event("computed", PROGRAM, mesh.logging_rank)
