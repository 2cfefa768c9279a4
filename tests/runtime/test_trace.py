"""What a trace tells: spans from events, and back from its file; the picture; a recorded run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ringopt.distributed.mesh import PROGRAM
from ringopt.distributed.traffic import Event, log_event
from ringopt.errors import OptionError
from ringopt.runtime.trace import (
    LANES,
    TRACKS,
    Span,
    Trace,
    chrome,
    covered,
    on_tracks,
    read_spans,
    spans_of,
    sums,
    trace_to,
)
from ringopt.tools import timeline
from ringopt.tools.cli import main
from tests.harness.pages import data_of

EVENTS = [
    Event("posted", "forward 0", 80, 80, 1, 10.0, 0, site="layers.0"),
    Event("computed", "forward 0", 0, 0, 0, 13.0, 0, site="layers.0"),
    Event("waited", "forward 0", 0, 0, 0, 14.0, 0, blocked=1.0, site="layers.0"),
    Event("computed", "forward 1", 0, 0, 0, 16.0, 0, site="layers.0"),
    Event("all_reduce", "gradients", 20, 20, 2, 19.0, 0, blocked=2.0),
]


def test_spans_of_events() -> None:
    spans = spans_of(EVENTS)
    start = spans[0].begin
    told = [(span.lane, span.label, round(span.begin - start, 6), round(span.seconds, 6), span.bytes) for span in spans]
    assert told == [
        ("compute", "forward 0", 0.0, 3.0, 0),
        ("link", "forward 0", 0.0, 4.0, 80),
        ("exposed", "forward 0", 3.0, 1.0, 0),
        ("compute", "forward 1", 4.0, 2.0, 0),
        ("link", "gradients", 7.0, 2.0, 20),
        ("exposed", "gradients", 7.0, 2.0, 0),
    ]


def test_what_the_program_computes_beside_an_exchange_is_told_from_attention() -> None:
    """And what it computes beside none is not told at all."""
    events = [
        Event("all_reduce", "", 4, 4, 1, 1.0, 0),
        Event("computed", PROGRAM, 0, 0, 0, 3.0, 0),
        Event("posted", "forward 0", 8, 8, 1, 3.0, 0),
        Event("computed", PROGRAM, 0, 0, 0, 5.0, 0),
        Event("computed", "forward 0", 0, 0, 0, 6.0, 0),
        Event("waited", "forward 0", 0, 0, 0, 6.0, 0),
    ]
    spans = [(span.lane, span.label, span.seconds) for span in spans_of(events) if span.seconds > 1e-3]
    assert spans == [
        ("program", PROGRAM, pytest.approx(2)), ("compute", "forward 0", pytest.approx(1)),
        ("link", "forward 0", pytest.approx(3)),
    ]  # fmt: skip
    assert spans_of(events)[0].label == "all_reduce"


def test_exposed_communication_is_a_number() -> None:
    [rank] = sums(spans_of(EVENTS))
    found = (rank.total, rank.compute, rank.program, rank.link, rank.exposed, rank.hidden)
    assert found == pytest.approx((9.0, 5.0, 0.0, 6.0, 3.0, 0.5), abs=1e-5)
    assert rank.bytes == 100


def test_spans_that_overlap_count_once() -> None:
    spans = [Span(0, "link", "", *ends) for ends in ((0.0, 2.0), (1.0, 4.0), (1.5, 2.0), (6.0, 7.0))]
    assert covered(spans) == 5.0


def test_the_file_is_a_chrome_trace(tmp_path: Path) -> None:
    spans = spans_of(EVENTS)
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(chrome(spans)))
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["rank 0", "compute", "exposed", "link"]
    for found, expected in zip(read_spans(path), sorted(spans, key=lambda span: span.begin), strict=True):
        told = (found.rank, found.lane, found.label, found.bytes, found.site)
        assert told == (0, expected.lane, expected.label, expected.bytes, expected.site)
        assert (found.begin, found.seconds) == pytest.approx((expected.begin, expected.seconds), abs=1e-5)


def test_what_overlaps_is_on_tracks_of_its_own() -> None:
    """Perfetto drops a complete event that overlaps another of its track."""
    ends = ((0.0, 2.0), (1.0, 4.0), (1.5, 1.7), (2.0, 3.0))
    spans = [Span(0, "link", f"forward {i}", *of) for i, of in enumerate(ends)]
    assert [track % TRACKS for _, track in on_tracks(spans)] == [0, 1, 2, 0]
    events = [event for event in chrome(spans)["traceEvents"] if event["ph"] == "X"]
    assert {type(event[key]) for event in events for key in ("ts", "dur")} == {int}  # adjacent spans stay so


def test_the_end_of_a_run_cuts_what_began_before() -> None:
    spans = [Span(0, "link", "", 0.0, 9.0, 5), Span(0, "exposed", "", 2.0, 4.0), Span(0, "exposed", "", 7.0, 8.5)]
    [rank] = sums(timeline.last(spans, 2.0))
    assert (rank.total, rank.link, rank.exposed, rank.hidden) == (2.0, 2.0, 1.5, 0.25)


@pytest.mark.parametrize(
    ("seconds", "expected"), [(4.2, [0, 1, 2, 3, 4]), (0.15, [0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.12, 0.14]), (0, [0])]
)
def test_ticks_are_round_numbers(seconds: float, expected: list[float]) -> None:
    assert timeline.ticks(seconds) == pytest.approx(expected)


def test_the_picture_escapes_and_tells(tmp_path: Path) -> None:
    picture = timeline.drawn([Span(1, "link", "<b>", 0.0, 0.5, 1234), Span(3, "exposed", "wait", 0.2, 0.5)])
    assert picture.count("<rect") == 1 + len(LANES) + 2
    assert ">400 ms<" in picture
    assert "rank 1, &lt;b&gt;: 500.00 ms, 1,234 bytes" in picture and "rank 3, wait: 300.00 ms<" in picture


class Attend(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, -1, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(), Attend()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).square().mean()


def recorded(folder: str) -> int:
    torch.manual_seed(0)
    options = {"trace": folder, "inner_backend": "eager", "strategy": "ring"}
    torch.compile(Net(), backend="ring", options=options)(torch.randn(1, 12, 16)).backward()
    trace = trace_to(folder, torch.distributed.get_rank())
    trace.close()
    return trace.traffic.bytes_sent


def test_a_recorded_run(ranks: Callable[..., list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sent = ranks(2, recorded, str(tmp_path))
    for rank, size in enumerate(sent):
        spans = read_spans(tmp_path / f"rank-{rank}.json")
        assert sum(span.bytes for span in spans) == size
        told = {(span.lane, span.label, span.site) for span in spans}
        for site in ("first", "second"):
            assert {("link", "forward 0", site), ("link", "backward 0", site)} <= told
            assert {("compute", "forward 0", site), ("compute", "forward 1", site)} <= told
    assert main(["timeline", str(tmp_path), "--svg", str(tmp_path / "t.svg")]) == 0
    assert "exposed" in capsys.readouterr().out
    assert (tmp_path / "t.svg").read_text().startswith("<svg")
    page, whole = tmp_path / "t.html", tmp_path / "all.json"
    assert main(["timeline", str(tmp_path), "--html", str(page), "--perfetto", str(whole)]) == 0
    data, trace = data_of(page.read_text()), json.loads(whole.read_text())
    assert {site: set("".join(mask["ranks"])) for site, mask in data["masks"].items()} == {
        "first": set(".01"), "second": set(".01"),
    }  # fmt: skip
    assert trace["otherData"]["masks"] == data["masks"]
    assert sum(one["bytes"] for one in data["sums"]) == sum(sent) and {row[0] for row in data["spans"]} == {0, 1}
    assert list(against_the_format(trace)) == []
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == len(data["spans"])


def against_the_format(trace: dict[str, Any]) -> Iterator[str]:
    """What is not as the Trace Event Format has it, or what Perfetto drops: complete events that overlap on a track."""
    until: dict[tuple[int, int], int] = {}
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for event in sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0)):
        if not all(isinstance(event.get(key), int) for key in ("pid", "tid")) or not isinstance(event["name"], str):
            yield f"no process, thread or name: {event}"
        if event["ph"] == "M":
            if event["name"] not in ("process_name", "thread_name") or not isinstance(event["args"]["name"], str):
                yield f"metadata: {event}"
            continue
        track = event["pid"], event["tid"]
        if event["ph"] != "X" or event["ts"] < 0 or event["dur"] < 0 or not isinstance(event["cat"], str):
            yield f"no complete event: {event}"
        if track not in named:
            yield f"a track without a name: {event}"
        if event["ts"] < until.get(track, 0):
            yield f"overlaps: {event}"
        until[track] = event["ts"] + event["dur"]


def test_what_the_format_forbids_is_found() -> None:
    trace = chrome([Span(0, "link", "", 1.0, 3.0), Span(0, "link", "", 4.0, 5.0)])
    assert list(against_the_format(trace)) == []
    trace["traceEvents"][-1]["ts"] = 2_000_000
    assert [why.partition(":")[0] for why in against_the_format(trace)] == ["overlaps"]


@pytest.mark.parametrize(
    ("content", "words", "sentence"),
    [
        (None, [], 'holds no rank-*.json; run the program with options={"trace": '),
        ("{}", [], "is no trace of ringopt: KeyError"),
        ('{"traceEvents": []}', [], "holds traces in which nothing was exchanged"),
        (json.dumps(chrome(spans_of(EVENTS))), ["--last", "0"], "--last 0: expected a number of seconds above 0"),
        (
            json.dumps(chrome(spans_of(EVENTS))),
            ["--svg", "/no/such/t.svg"],
            "--svg /no/such/t.svg: there is no folder /no/such",
        ),
    ],
)
def test_errors(
    content: str | None, words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "rank-0.json").write_text(content)
    assert main(["timeline", str(tmp_path), *words]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", "")


# ---- a full disk -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_trace_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    monkeypatch.setattr("ringopt.runtime.trace.EVERY", -1.0)
    trace, real = Trace(str(tmp_path), 0), Path.write_bytes
    trace.called()
    before = trace.path.read_text()

    def full(self: Path, data: bytes) -> None:
        real(self, data[:5])
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(3):
        trace.called()
    trace.close()
    [said] = [record.getMessage() for record in caplog.records]
    assert said == f"option trace: cannot write {trace.path}: {os.strerror(number)}; nothing more is recorded"
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.json"] and trace.path.read_text() == before
    log_event("posted", "later", 0)
    assert not trace.traffic.events


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="a file system is mounted by root alone")
def test_on_a_disk_that_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        trace = Trace(str(tmp_path / "trace"), 0)
        trace.traffic.events += EVENTS * 200
        trace.write()
        assert [record.levelname for record in caplog.records] == ["WARNING"] and "No space left" in caplog.text
        assert not list((tmp_path / "trace").iterdir())
        trace.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_made_is_an_error_unless_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"option trace=.*: .*; name a folder that can be made"):
        Trace(str(tmp_path / "file"), 0)

    def full(self: Path, *given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "mkdir", full)
    Trace(str(tmp_path / "trace"), 0).close()
