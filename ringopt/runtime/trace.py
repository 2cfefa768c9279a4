"""What a rank did when: exchanges under way, waits for them, compute between, as spans that a trace viewer shows.

    link       from the moment an exchange was posted until it had been waited for
    compute    the blocks of attention that were computed beside it
    program    what the program computed beside it, between two operators that talk
    exposed    the rank waited and did nothing else, for an exchange or in a collective

A file holds one rank, in the Trace Event Format (chrome://tracing, ui.perfetto.dev): complete events ("X") in whole
microseconds since the epoch, pid the rank, cat one of LANES. Exchanges overlap, and Perfetto drops what overlaps on one
track: each lane has as many tracks (tid) as it needs. The clocks of several machines are as equal as they are kept.
"""

from __future__ import annotations

import atexit
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ringopt.distributed.mesh import PROGRAM
from ringopt.distributed.traffic import Event, Traffic, record_from_now_on, stop
from ringopt.errors import OptionError
from ringopt.output.drawn import MaskPicture
from ringopt.output.files import FULL, write_whole
from ringopt.output.printable import logger
from ringopt.report import Site

log = logger(__name__)

LANES = ("compute", "program", "exposed", "link")
TRACKS = 1000  # of a lane, at most
EVERY = 5.0  # seconds between two writes of a trace


@dataclass(frozen=True)
class Span:
    """`begin` and `end` in seconds since the epoch; `bytes` sent by this rank; `site`: see
    Event."""

    rank: int
    lane: str
    label: str
    begin: float
    end: float
    bytes: int = 0
    site: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    @property
    def name(self) -> str:
        return f"{self.label}{_behind(self.site)}"


def _behind(site: str) -> str:
    return f", {site}" if site else ""


def spans_of(events: Iterable[Event]) -> list[Span]:
    """The spans of the events of any ranks of this process, by their ends."""
    epoch = time.time() - time.monotonic()
    spans: list[Span] = []
    posted: dict[tuple[int, str, str], Event] = {}
    last: dict[int, float] = {}

    def add(event: Event, lane: str, begin: float, sent: int = 0) -> None:
        label = event.label or event.kind
        spans.append(Span(event.rank, lane, label, epoch + begin, epoch + event.seconds, sent, event.site))

    for event in events:
        rank, key = event.rank, (event.rank, event.label, event.site)
        if event.kind == "posted":
            posted[key] = event
        elif event.kind == "computed":
            program = event.label == PROGRAM
            if rank in last and not (program and all(other != rank for other, *_ in posted)):
                add(event, "program" if program else "compute", last[rank])
        else:
            start = event.seconds - event.blocked
            if event.kind == "waited" and key in posted:
                add(event, "link", posted[key].seconds, posted.pop(key).bytes)
            elif event.kind != "waited":
                add(event, "link", start, event.bytes)
            add(event, "exposed", start)
        last[rank] = event.seconds
    return spans


def chrome(spans: Iterable[Span], masks: Mapping[str, MaskPicture] | None = None) -> dict[str, Any]:
    """The Trace Event Format, with the masks of attentions by site where viewers leave what they do not know."""
    placed = on_tracks(spans)
    ranks = {span.rank: f"rank {span.rank}" for span, _ in placed}
    tracks = {(span.rank, track): span.lane for span, track in placed}
    return {
        "traceEvents": [
            *(_metadata_event("process_name", rank, 0, label) for rank, label in sorted(ranks.items())),
            *(_metadata_event("thread_name", rank, track, lane) for (rank, track), lane in sorted(tracks.items())),
            *(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.lane,
                    "pid": span.rank,
                    "tid": track,
                    "ts": round(span.begin * 1e6),
                    "dur": round(span.end * 1e6) - round(span.begin * 1e6),
                    "args": {"bytes": span.bytes, "site": span.site},
                }
                for span, track in placed
            ),
        ],
        "otherData": {"masks": {site: asdict(mask) for site, mask in (masks or {}).items()}},
    }


def _metadata_event(what: str, rank: int, track: int, label: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": track, "args": {"name": label}}


def on_tracks(spans: Iterable[Span]) -> list[tuple[Span, int]]:
    """By their begin, each with the number of its track, on which no two overlap."""
    placed: list[tuple[Span, int]] = []
    ends: dict[tuple[int, str], list[float]] = {}
    for span in sorted(spans, key=lambda span: span.begin):
        tracks = ends.setdefault((span.rank, span.lane), [])
        track = next((i for i, end in enumerate(tracks) if end <= span.begin), len(tracks))
        tracks[track : track + 1] = [span.end]
        placed.append((span, TRACKS * LANES.index(span.lane) + track))
    return placed


def read_spans(path: Path) -> list[Span]:
    """The spans of a file that ringopt wrote. Raises ValueError for another."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [
            Span(
                e["pid"], e["cat"], e["name"].removesuffix(_behind(site := e["args"].get("site", ""))), e["ts"] / 1e6,
                (e["ts"] + e["dur"]) / 1e6, e["args"]["bytes"], site,
            )
            for e in events
            if e["ph"] == "X"
        ]  # fmt: skip
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no trace of ringopt: {type(error).__name__}: {error}") from None


def read_masks(path: Path) -> dict[str, MaskPicture]:
    """By site, of a file that `read_spans` read; none where a ringopt wrote it that drew none."""
    drawn = json.loads(path.read_text(encoding="utf-8")).get("otherData", {}).get("masks", {})
    return {site: MaskPicture(**{name: tuple(rows) for name, rows in mask.items()}) for site, mask in drawn.items()}


@dataclass(frozen=True)
class Sums:
    """Of one rank, in seconds: `total` from its first span to the end of its last; `link` while an exchange was under
    way; `compute` and `program` while blocks of attention, and what else the program does, were computed beside it;
    `exposed` while it waited."""

    rank: int
    total: float
    compute: float
    program: float
    link: float
    exposed: float
    bytes: int

    @property
    def hidden(self) -> float:
        """The part of the time of exchanges in which the rank did not wait."""
        return 1 - self.exposed / self.link if self.link else 1.0


def sums(spans: Sequence[Span]) -> list[Sums]:
    """By rank."""
    found = []
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        by_lane = {lane: [span for span in own if span.lane == lane] for lane in LANES}
        total = max(span.end for span in own) - min(span.begin for span in own)
        seconds = {lane: covered(of_lane) for lane, of_lane in by_lane.items()}
        found.append(Sums(rank, total, **seconds, bytes=sum(span.bytes for span in by_lane["link"])))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of them was there."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        total += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return total


class Trace:
    """Records from now until the process ends, into `folder`/rank-R.json: written every few seconds, while calls are
    made, and at the end. Raises OptionError where the folder cannot be made. A file that cannot be written (a full
    disk) is warned of, once, and ends the record and not the program; what was written before stays."""

    def __init__(self, folder: str, rank: int):
        self.path = Path(folder, f"rank-{rank}.json")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in FULL:
                sentence = f"option trace={folder!r}: {error.strerror}; name a folder that can be made"
                raise OptionError(sentence) from None
        self.traffic: Traffic = record_from_now_on()
        self.masks: dict[str, MaskPicture] = {}
        self._stopped = False
        self._written = time.monotonic()
        atexit.register(self.close)

    def close(self) -> None:
        """Records nothing more."""
        if self._stopped:
            return
        stop(self.traffic)
        self.write()
        atexit.unregister(self.close)

    def write(self) -> None:
        self.traffic.settle()
        try:
            write_whole(self.path, json.dumps(chrome(spans_of(self.traffic.events), self.masks)))
        except OSError as error:
            log.warning("option trace: cannot write %s: %s; nothing more is recorded", self.path, error.strerror)
            self._stopped = True
            stop(self.traffic)
            self.traffic.events.clear()
            atexit.unregister(self.close)
        self._written = time.monotonic()

    def called(self) -> None:
        """Writes the file where that is due; runs at every call of the program."""
        if not self._stopped and time.monotonic() - self._written > EVERY:
            self.write()


def with_trace(run: Callable[..., Any], trace: Trace, sites: Iterable[Site]) -> Callable[..., Any]:
    """`run`, which first writes the trace at a call where that is due; the trace has the masks of its sites."""
    trace.masks.update({site.module: site.picture for site in sites if site.picture is not None})

    def call(*inputs: Any) -> Any:
        trace.called()
        return run(*inputs)

    return call


_traces: dict[str, Trace] = {}


def trace_to(folder: str, rank: int) -> Trace:
    """The trace of this process into `folder`, begun when it is first asked for."""
    if folder not in _traces:
        _traces[folder] = Trace(folder, rank)
    return _traces[folder]
