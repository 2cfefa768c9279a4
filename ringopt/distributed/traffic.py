"""Counters and a log of communication events, kept only while a recording is on.

A GPU runs behind the host that gives it work, so there an event is when the GPU comes to it: marks in its stream, which
are read when the recording ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

EventKind = Literal["posted", "waited", "computed", "all_gather", "all_reduce"]


@dataclass(frozen=True)
class Event:
    """One thing a rank did.

    kind            "posted", "waited": an exchange was started, has ended; "computed": the blocks that hide it are
    done;
                    "all_gather", "all_reduce": a collective
    label           of the exchange, such as "forward 0"; "computed" has the label of the exchange that it hides
    bytes           handed to the link by this rank (a collective counts as its ring algorithm)
    bytes_received  taken from the link by this rank
    messages        how many messages this rank sent
    seconds         time of its end on the monotonic clock; of a GPU, once the recording has ended, when that came to it
    rank            in its mesh
    blocked         seconds in which this rank could do nothing else: in "waited" and the collectives
    site            for which attention of the program, as the report names it; "" where none is known
    """

    kind: EventKind
    label: str
    bytes: int
    bytes_received: int
    messages: int
    seconds: float
    rank: int
    blocked: float = 0.0
    site: str = ""


@dataclass(frozen=True)
class Mark:
    """Now: on the host, and in the stream of a GPU (its number) where the process has one in use."""

    host: float
    event: Any = None
    device: int = -1


def mark_here() -> Mark:
    """Also where nothing is recorded."""
    now = time.monotonic()
    if not torch.cuda.is_initialized():
        return Mark(now)
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Mark(now, event, torch.cuda.current_device())


def mark() -> Mark:
    """For `began` of `log_event`: of the GPU while a recording is on."""
    return mark_here() if _recording else Mark(time.monotonic())


@dataclass
class Traffic:
    """The events recorded so far, oldest first, and their sums."""

    events: list[Event] = field(default_factory=list)
    # Of which events, their begin and end; and a mark before which the GPU had nothing left to do.
    _marks: dict[int, tuple[Mark | None, Mark]] = field(default_factory=dict, repr=False, compare=False)
    _base: Mark | None = field(default=None, repr=False, compare=False)

    def begin(self) -> None:
        """From now on it is recorded."""
        if (base := mark_here()).event is not None:
            base.event.synchronize()
            self._base = replace(base, host=time.monotonic())

    def add(self, event: Event, began: Mark | None, ended: Mark) -> None:
        """One that ended now."""
        if ended.event is not None:
            self._marks[len(self.events)] = began, ended
        self.events.append(event)

    def settle(self) -> None:
        """The times of the GPU in the place of those of the host. Waits for it."""
        marks, self._marks = self._marks, {}
        for place, (began, ended) in marks.items():
            seconds = self._on_device(ended)
            blocked = seconds - self._on_device(began) if began is not None else 0.0
            self.events[place] = replace(self.events[place], seconds=seconds, blocked=blocked)

    def _on_device(self, mark: Mark) -> float:
        if self._base is None or mark.event is None or mark.device != self._base.device:
            return mark.host
        mark.event.synchronize()
        return self._base.host + float(self._base.event.elapsed_time(mark.event)) / 1e3

    @property
    def bytes_sent(self) -> int:
        return sum(event.bytes for event in self.events)

    @property
    def bytes_received(self) -> int:
        return sum(event.bytes_received for event in self.events)

    @property
    def blocked(self) -> float:
        """Seconds of exposed communication, in which a rank waited and computed nothing."""
        return sum(event.blocked for event in self.events)

    @property
    def messages(self) -> int:
        return sum(event.messages for event in self.events)

    def of(self, rank: int) -> Traffic:
        """The events of one rank, for ranks that share a process, as in tests."""
        return Traffic([event for event in self.events if event.rank == rank])


# Of a thread: the site that it works for.
_working_for = threading.local()


@contextmanager
def working_for(site: str) -> Iterator[None]:
    """Within it, events are of `site`."""
    outer, _working_for.site = this_site(), site
    try:
        yield
    finally:
        _working_for.site = outer


def this_site() -> str:
    """That of `working_for`, or ""."""
    return getattr(_working_for, "site", "")


# Global to the process, not to a thread: the backward of an accelerator runs in a thread of the autograd engine.
_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Records what this process sends and receives through ringopt.

    The first call with new shapes also compares them over the ranks, which shows as "all_gather" events.
    """
    traffic = record_from_now_on()
    try:
        yield traffic
    finally:
        stop(traffic)


def record_from_now_on() -> Traffic:
    """As `record_traffic`, until `stop`."""
    traffic = Traffic()
    traffic.begin()
    _recording.append(traffic)
    return traffic


def stop(traffic: Traffic) -> None:
    """Ends a recording of `record_from_now_on`."""
    # By identity: two recordings that saw the same events are equal.
    _recording[:] = [other for other in _recording if other is not traffic]
    traffic.settle()


def log_event(
    kind: EventKind,
    label: str,
    rank: int,
    sent: int = 0,
    received: int = 0,
    messages: int = 0,
    *,
    began: Mark | None = None,
) -> None:
    """Adds an event to all recordings: bytes `sent` and `received`, number of `messages` sent. `began`: since when the
    rank has been blocked."""
    if not _recording:
        return
    now = mark_here()
    blocked = now.host - began.host if began is not None else 0.0
    event = Event(kind, label, sent, received, messages, now.host, rank, blocked, this_site())
    for traffic in _recording:
        traffic.add(event, began, now)
