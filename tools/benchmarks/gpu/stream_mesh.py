"""p ranks as threads of one process on one device. On a GPU each has a stream of its own, and messages are copies on
further streams that nothing orders but events: what is read before it was waited for, or written while it leaves, is
seen in the numbers, for buffers hold NaN until their message has come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from ringopt.distributed.mesh import Mesh, Transfer

T = TypeVar("T")

TIMEOUT = 120.0


@dataclass
class End:
    """One end of a message. `ready`: the event behind which its buffer may be touched; `done`: that behind which it has
    been copied."""

    buffer: Tensor
    ready: Any
    met: threading.Event = field(default_factory=threading.Event)
    source: Tensor | None = None
    done: Any = None


class StreamMesh(Mesh):
    """See the module."""

    def __init__(self, size: int, device: torch.device):
        super().__init__()
        self._size, self.device = size, device
        self._local, self._lock = threading.local(), threading.Lock()
        self._barrier = threading.Barrier(size, timeout=TIMEOUT)
        self._slots: list[Any] = [None] * size
        self._sends: dict[tuple[int, int], deque[End]] = {}
        self._receives: dict[tuple[int, int], deque[End]] = {}

    @property
    def name(self) -> str:
        return "streams"

    @property
    def rank(self) -> int:
        return int(self._local.rank)

    @property
    def size(self) -> int:
        return self._size

    def run(self, body: Callable[[Mesh], T]) -> list[T]:
        """`[body(mesh) on each rank]`. Raises the error that came first."""
        errors: list[BaseException] = []

        def as_rank(rank: int) -> T | None:
            self._local.rank = rank
            try:
                with self._stream():
                    found = body(self)
                    self._synchronize()
                    return found
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()
                return None

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what the ranks read was made on another stream than theirs
        with ThreadPoolExecutor(self._size) as pool:
            results = list(pool.map(as_rank, range(self._size)))
        if errors:
            raise errors[0]
        return results  # type: ignore[return-value]

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        found = []
        for peer, buffer in receives:
            buffer.fill_(torch.nan if buffer.is_floating_point() else 77)
            found.append(self._met(buffer, (peer, self.rank), self._receives, self._sends, label))
        for peer, buffer in sends:
            found.append(self._met(buffer, (self.rank, peer), self._sends, self._receives, label))
        return found

    def _met(self, buffer: Tensor, way: tuple[int, int], mine: Any, theirs: Any, label: str) -> Transfer:
        """Leaves an end for the other side; whoever comes second copies."""
        own = End(buffer, self._event())
        with self._lock:
            waiting = theirs.get(way)
            other = waiting.popleft() if waiting else None
            if other is None:
                mine.setdefault(way, deque()).append(own)
        if other is not None:
            sent, got = (own, other) if mine is self._sends else (other, own)
            self._copy(sent, got)
        return Transfer(label, Arrival(self, own))

    def _copy(self, sent: End, got: End) -> None:
        if self.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(self.device)) as _:
                for end in (sent, got):
                    torch.cuda.current_stream().wait_event(end.ready)
                got.buffer.copy_(sent.buffer)
                sent.done = got.done = self._event()
        else:
            got.source = sent.buffer.clone()  # copied when it is waited for
        for end in (sent, got):
            end.met.set()

    # ---- collectives -------------------------------------------------------------------------------------------------
    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        self._slots[self.rank] = x.detach().clone()
        self._synchronize()
        self._barrier.wait()
        brought = [part.clone() for part in self._slots]
        self._synchronize()
        self._barrier.wait()  # nobody may bring the next before all have this
        return brought

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return torch.stack(self._all_gather(x, label)).sum(0, dtype=x.dtype)

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        x.copy_(self._all_reduce(x, label))
        return Transfer(label, Done())

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        return self._all_gather(x, label), Transfer(label, Done())

    # ---- the device --------------------------------------------------------------------------------------------------
    def _stream(self) -> Any:
        return torch.cuda.stream(torch.cuda.Stream(self.device)) if self.device.type == "cuda" else nullcontext()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _event(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None


@dataclass
class Arrival:
    """What a rank waits for: on a GPU its stream does, not the host, once the other side has posted."""

    mesh: StreamMesh
    end: End

    def wait(self) -> None:
        """Raises RuntimeError, as a transport does, where the other side never comes."""
        if not self.end.met.wait(TIMEOUT):
            raise RuntimeError("the other side of a message never came")
        if self.end.done is not None:
            torch.cuda.current_stream().wait_event(self.end.done)
        elif self.end.source is not None:
            self.end.buffer.copy_(self.end.source)


class Done:
    """Of what is done already."""

    def wait(self) -> None: ...
