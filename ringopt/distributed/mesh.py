"""The ranks that share one sequence, and the few ways they talk.

A mesh is looked up by name when an operator runs, so that the graph that calls it is the same on every rank. Two
kinds are at home here: what a mesh is (`Mesh`), and one that is only pretended, for dry runs (`PretendedMesh`). The one
over a process group is in process.py.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ringopt.distributed.standing import Call, Recent
from ringopt.distributed.traffic import log_event
from ringopt.errors import RingCommError, RingError, first_line
from ringopt.torch_compat.autograd import StopRecomputationError

# What is recorded as computed, where no operator of ringopt computed it.
PROGRAM = "the program"

ADVICE = (
    "A peer died, hung, or did not make the same call; look at the output of the other ranks. The process group cannot "
    "be used any more: restart the ranks"
)


class Work(Protocol):
    """What a transport returns for a message under way. The return value of `wait` means nothing here."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Transfer:
    """One message under way (several, where the transport waits for them together)."""

    what: str
    work: Work


class Pending:
    """Messages under way. Their buffers must not be freed, written (send) or read (receive) before `wait` has
    returned."""

    def __init__(self, mesh: Mesh, buffers: Sequence[Tensor], label: str):
        self.label = label
        self._mesh, self._buffers = mesh, list(buffers)
        self._transfers: list[Transfer] = []
        self._begin = time.monotonic()

    def under_way(self, transfers: Sequence[Transfer]) -> None:
        self._transfers.extend(transfers)

    def wait(self) -> None:
        """Blocks until every message has arrived or left. Raises RingCommError, with the transport's error as cause.

        A second call waits for nothing: a work of gloo that is waited for twice blocks until the timeout.
        """
        began = time.monotonic()
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
            log_event("waited", self.label, self._mesh.rank, began=began)


class Mesh(ABC):
    """`size` ranks, of which this is `rank`. `device` is where small control messages live."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        # After an error nobody waits for these any more, and yet the transport may still write into their buffers.
        self.in_flight: set[Pending] = set()
        self.recent = Recent()
        self._within = threading.local()  # whether this thread is in the midst of a program
        # Passes of autograd that have begun a program's and are not over (runtime/input_check.py).
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
    def teller(self) -> int:
        """The rank under which events are recorded."""
        return self.rank

    @property
    def gathers_in_place(self) -> bool:
        """Whether what it gathers in CPU memory goes by way of no buffer of the transport's."""
        return False

    @property
    def remark(self) -> str:
        """What a report says of how its messages travel, or ""."""
        return ""

    def apart(self) -> Mesh:
        """The same ranks, with messages that cannot meet those of this mesh: for what a rank may do alone by mistake.
        Where that takes a new process group, all ranks make the first call together."""
        return self

    def failed(self, label: str, what: str, begin: float, error: RuntimeError) -> RingCommError:
        """What to raise of a message: what was done, for how long since `begin`, and what the transport said of it."""
        said = first_line(error).rstrip(".")
        return RingCommError(
            f"rank {self.rank} of {self.size} ({self.name}), {label or 'exchange'}: {what} failed after "
            f"{time.monotonic() - begin:.1f} s: {said}. {ADVICE}"
        )

    def held(self) -> AbstractContextManager[None]:
        """For what talks: this thread is inside the mesh meanwhile, and no other may be. Raises RingThreadError."""
        return nullcontext()  # most meshes are pretended

    def stands(self, call: Call, publish: bool = False) -> None:
        """In which call this rank is; `publish`: the others can read it from now on."""
        self.recent.call = call

    def begin_program(self) -> None:  # noqa: B027 (what counts them is who may be cut short)
        """This rank takes part in one more program that talks."""

    def cut_short(self, why: str, kind: str, later: bool = False) -> None:  # noqa: B027 (most meshes are of one process)
        """This rank takes no more part in the program that it was in the midst of, after an error of this `kind`; ""
        for one that may come anywhere, and leave anything half done. `later`: noticed at the next call."""

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """For a program that talks. An error in its midst may be this rank's alone (a number out of range in its rows,
        no memory left): its peers are then at a message that never comes, and whoever goes on with another call would
        send them that one's. So the mesh ends, unless all ranks were cut short at the same message; at once after an
        interrupt. Errors of ringopt are raised on all ranks alike, or have ended it; so is the one by which a
        checkpoint stops to compute again."""
        within, self._within.program = getattr(self._within, "program", False), True
        try:
            with self.held():
                if not within:
                    self.begin_program()
                yield
        except (RingError, StopRecomputationError):
            raise
        except BaseException as error:
            if not within:  # else whoever runs the program hears of it as well
                kind = type(error).__name__
                why = f"an earlier call was cut short by {kind}: {first_line(error)}"
                self.cut_short(why, kind if isinstance(error, Exception) else "")
            raise
        finally:
            self._within.program = within

    def attend(self) -> None:  # noqa: B027 (most transports have threads)
        """For long computations to call now and then: a transport without threads moves what has come meanwhile."""

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
            self.recent.note("all_gather", label, sent=moved)
            began, gathered = time.monotonic(), self._all_gather(x, label)
        self.recent.note("done", label)
        log_event("all_gather", label, self.rank, moved, moved, self.size - 1, began=began)
        return gathered

    def all_reduce(self, x: Tensor, label: str = "") -> Tensor:
        """The sum of `x` over the ranks: a new contiguous tensor, the same bits on all of them."""
        if self.size == 1:
            return x.clone(memory_format=torch.contiguous_format)
        moved = 2 * x.nbytes * (self.size - 1) // self.size
        with self.held():
            self.recent.note("all_reduce", label, sent=moved)
            began, total = time.monotonic(), self._all_reduce(x, label)
        self.recent.note("done", label)
        log_event("all_reduce", label, self.rank, moved, moved, 2 * (self.size - 1), began=began)
        return total

    def start_all_reduce(self, x: Tensor, label: str = "") -> Pending:
        """As `all_reduce`, in place and not waited for: `x`, contiguous, holds the sum when `wait` has returned. All
        ranks start their collectives in the same order."""
        pending = Pending(self, [x], label)
        if self.size > 1 and x.numel():
            moved = 2 * x.nbytes * (self.size - 1) // self.size
            with self.held():
                self.recent.note("posted", label, "all", moved)
                log_event("posted", label, self.rank, moved, moved, 2 * (self.size - 1))
                self.in_flight.add(pending)
                pending.under_way([self._start_all_reduce(x, label)])
        return pending

    def start_all_gather(self, x: Tensor, label: str = "") -> tuple[list[Tensor], Pending]:
        """As `all_gather`, and not waited for: the tensors, in rank order, hold what the ranks gave when `wait` has
        returned. `x` must not be written before. All ranks start their collectives in the same order."""
        if self.size == 1 or not x.numel():
            return [x.clone() for _ in range(self.size)], Pending(self, [], label)
        moved = x.nbytes * (self.size - 1)
        with self.held():
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
    """Knows its rank and size and nothing else: for plans, reports and graphs made without processes. `hardware` (a
    name of ringopt/hardware/devices.py) is what the ranks are taken to be; None: like this machine."""

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

# The name in programs that run on any number of ranks: whoever runs them. A whole world, or one process alone.
ANY = "any"


def register(mesh: Mesh) -> None:
    """Makes `mesh` the one that `mesh_of(mesh.name)` returns from now on."""
    _meshes[mesh.name] = mesh


def registered(name: str) -> Mesh | None:
    return _meshes.get(name)


def forget_all() -> None:
    """Drops every mesh, and the buffers of messages nobody waited for. For when process groups are destroyed."""
    _meshes.clear()


def known() -> list[str]:
    """The names of all registered meshes."""
    return sorted(_meshes)


def program_until_here(mesh: Mesh) -> None:
    """To be told at the begin of an operator before which messages may be under way: without it, blocks of attention
    would seem to take as long as what stands before them."""
    log_event("computed", PROGRAM, mesh.teller)
