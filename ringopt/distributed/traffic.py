"""What a program sent and in which order: counters and a log of events, kept only while somebody records."""

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

    kind            "posted", "waited": an exchange was started, has ended; "computed": the blocks beside it are done;
                    "all_gather", "all_reduce": a collective
    label           which exchange, such as "forward 0"; "computed" carries the label of the exchange that it hides
    bytes           handed to the link by this rank (a collective counts as its ring algorithm)
    bytes_received  taken from the link by this rank
    messages        how many messages this rank sent
    seconds         on the monotonic clock
    rank            in its mesh
    """

    kind: EventKind
    label: str
    bytes: int
    bytes_received: int
    messages: int
    seconds: float
    rank: int


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
    def messages(self) -> int:
        return sum(event.messages for event in self.events)

    def of(self, rank: int) -> Traffic:
        """What one rank did: of use where ranks share a process, as in tests."""
        return Traffic([event for event in self.events if event.rank == rank])


# Global to the process, not to a thread: the backward of an accelerator runs in a thread of the autograd engine.
_recording: list[Traffic] = []


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Counts what this process sends and receives through ringopt meanwhile.

    The first call with new shapes also compares them over the ranks, which shows as "all_gather" events.
    """
    traffic = Traffic()
    _recording.append(traffic)
    try:
        yield traffic
    finally:
        # By identity: two recordings that saw the same events are equal.
        _recording[:] = [other for other in _recording if other is not traffic]


def log_event(kind: EventKind, label: str, rank: int, sent: int = 0, received: int = 0, messages: int = 0) -> None:
    """Tells whoever records; bytes `sent` and `received`, number of `messages` sent."""
    if not _recording:
        return
    event = Event(kind, label, sent, received, messages, time.monotonic(), rank)
    for traffic in _recording:
        traffic.events.append(event)
