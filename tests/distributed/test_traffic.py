"""What is counted, and that nothing is kept while nobody records."""

from __future__ import annotations

import time

import pytest
import torch

from ringopt.distributed import traffic as log
from ringopt.distributed.traffic import Traffic, log_event, record_traffic
from tests.harness.threads import ThreadMesh, run_on_threads


def test_an_exchange_counts_on_both_ends() -> None:
    def body(mesh: ThreadMesh) -> None:
        after, before = (mesh.rank + 1) % 3, (mesh.rank - 1) % 3
        sends = [(after, torch.ones(4)), (before, torch.ones(2, dtype=torch.bfloat16))]
        mesh.exchange(sends, [(before, torch.ones(4)), (after, torch.ones(2, dtype=torch.bfloat16))], "step").wait()

    with record_traffic() as traffic:
        run_on_threads(3, body)
    assert (traffic.bytes_sent, traffic.bytes_received, traffic.messages) == (60, 60, 6)
    one = traffic.of(1)
    assert (one.bytes_sent, one.bytes_received, one.messages) == (20, 20, 2)
    assert [(event.kind, event.label) for event in one.events] == [("posted", "step"), ("waited", "step")]
    assert one.events[0].seconds <= one.events[1].seconds


def test_collectives_count_as_their_ring() -> None:
    def body(mesh: ThreadMesh) -> None:
        mesh.all_gather(torch.ones(6), "shapes")  # 24 bytes to each of 2 others
        mesh.all_reduce(torch.ones(6))  # every byte twice round, but for a third

    with record_traffic() as traffic:
        run_on_threads(3, body)
    told = [(event.kind, event.label, event.bytes, event.bytes_received) for event in traffic.of(0).events]
    assert told == [("all_gather", "shapes", 48, 48), ("all_reduce", "", 32, 32)]


def test_recordings_nest_and_end() -> None:
    log_event("computed", "before", 0)
    with record_traffic() as outer:
        log_event("computed", "a", 0)
        with record_traffic() as inner:
            log_event("computed", "b", 0)
        log_event("computed", "c", 0)
    log_event("computed", "after", 0)
    assert [event.label for event in outer.events] == ["a", "b", "c"]
    assert [event.label for event in inner.events] == ["b"]
    assert not log._recording


def test_an_error_ends_the_recording() -> None:
    try:
        with record_traffic():
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert not log._recording


class Stream:
    """Of a GPU that comes to each mark 5 s after the host has given it, and to the first at once."""

    def __init__(self) -> None:
        self.marks, self.waited = 0, 0

    def event(self, enable_timing: bool) -> Stream.Event:
        assert enable_timing
        return Stream.Event(self)

    class Event:
        def __init__(self, stream: Stream):
            self.stream, self.at = stream, -1.0

        def record(self) -> None:
            self.at, self.stream.marks = 5.0 * self.stream.marks, self.stream.marks + 1

        def synchronize(self) -> None:
            self.stream.waited += 1

        def elapsed_time(self, other: Stream.Event) -> float:
            return (other.at - self.at) * 1e3


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, stream: Stream) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", stream.event)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_on_a_gpu_events_are_when_it_comes_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    on_a_gpu(monkeypatch, stream)
    log.mark()
    log_event("computed", "before", 0)
    assert stream.marks == 0, "nothing is marked while nobody records"
    with record_traffic() as traffic:
        begin = time.monotonic()
        log_event("posted", "one", 0)
        began = log.mark()
        log_event("waited", "one", 0, began=began)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        log_event("computed", "elsewhere", 0)
        assert stream.waited == 1, "the host waits at the begin and at the end, not between"
        assert traffic.events[1].seconds < begin + 1
    posted, waited, other = traffic.events
    assert waited.seconds - posted.seconds == pytest.approx(10) and waited.blocked == pytest.approx(5)
    assert posted.seconds == pytest.approx(begin + 5, abs=1) and traffic.blocked == waited.blocked
    assert other.seconds < begin + 1, "of a GPU that was not in use at the begin, the host's"
    traffic.settle()
    assert traffic.events == [posted, waited, other] and stream.marks == 5


def test_a_recording_is_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of a GPU are of one recording; they neither tell it apart from another one nor are shown."""
    on_a_gpu(monkeypatch, Stream())
    with record_traffic() as outer, record_traffic() as inner:
        log_event("computed", "a", 0)
        copied = Traffic(list(outer.events))
        assert outer == inner == copied and repr(outer) == repr(copied) == f"Traffic(events={outer.events})"
