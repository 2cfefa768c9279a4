"""Counters and a log of communication events, kept only while a recording is on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

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
    seconds         time of its end on the monotonic clock
    rank            in its mesh
    blocked         seconds in which this rank could do nothing else: in "waited" and the collectives
    """

    kind: EventKind
    label: str
    bytes: int
    bytes_received: int
    messages: int
    seconds: float
    rank: int
    blocked: float = 0.0


@dataclass
class Traffic:
    """The events recorded so far, oldest first, and their sums."""

    events: list[Event] = field(default_factory=list)

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
    _recording.append(traffic)
    return traffic


def stop(traffic: Traffic) -> None:
    """Ends a recording of `record_from_now_on`."""
    # By identity: two recordings that saw the same events are equal.
    _recording[:] = [other for other in _recording if other is not traffic]


def log_event(
    kind: EventKind,
    label: str,
    rank: int,
    sent: int = 0,
    received: int = 0,
    messages: int = 0,
    *,
    began: float | None = None,
) -> None:
    """Adds an event to all recordings: bytes `sent` and `received`, number of `messages` sent. `began`: time on the
    monotonic clock since which the rank has been blocked."""
    if not _recording:
        return
    now = time.monotonic()
    event = Event(kind, label, sent, received, messages, now, rank, now - began if began is not None else 0.0)
    for traffic in _recording:
        traffic.events.append(event)
