"""A flight recorder: the last events of each rank when a mesh is aborted, in a file, and how the ranks' calls differ.

A rank records events in memory, at less than a microsecond an event. When an error aborts its mesh it writes them to a
file, and publishes its call in the store of the process group; how the calls of the others differ is part of the error.
The store may not answer, so a thread queries it, which is joined for no longer than PATIENCE.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from threading import get_ident
from time import monotonic
from typing import TypeAlias

from ringopt.distributed.failure_agreement import PAUSE, Store
from ringopt.output.printable import printable

MOST = 64  # events
PATIENCE = 1.0  # seconds, for the other ranks to fail as well
SHOWN = 6  # inputs or operators that an error lists

# Time on the monotonic clock; event; exchange or call; peers; bytes sent; thread.
Noted: TypeAlias = tuple[float, str, str, object, int, int]


@dataclass(frozen=True)
class Call:
    """A call of a compiled program. `doing`: whether it is being compiled or called; `inputs`: sizes and dtypes."""

    doing: str = ""
    program: str = ""
    inputs: tuple[str, ...] = ()
    gradients: bool = False
    operators: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str | bytes) -> Call:
        """What `json.dumps(asdict(call))` says."""
        read = json.loads(text)
        return cls(**{**read, "inputs": tuple(read["inputs"])})


class Recent:
    """The last events of a rank, and its current call. `folder`: where they are written; "" is the system's folder for
    temporary files."""

    def __init__(self) -> None:
        self.events: deque[Noted] = deque(maxlen=MOST)
        self.call, self.folder = Call(), ""

    def note(self, what: str, label: str, ranks: object = "", sent: int = 0) -> None:
        self.events.append((monotonic(), what, label, ranks, sent, get_ident()))

    def write(self, name: str, rank: int, why: str) -> str:
        """Writes the events to a file. Returns a sentence for the error: its path, or why it could not be written."""
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        now, lines = time.monotonic(), [f"rank {rank} of mesh {name}, process {os.getpid()}, {time.ctime()}: {why}"]
        lines.append(f"{self.call.doing or 'outside of compiled calls'} {', '.join(self.call.inputs)}".rstrip())
        for when, what, label, ranks, sent, thread in list(self.events):
            where = threads.get(thread, thread)
            lines.append(f"{when - now:10.4f} s  {what:10} {label:24} {ranks!s:24} {sent:>12} B  {where}")
        try:
            if self.folder:
                os.makedirs(self.folder, exist_ok=True)
            number, path = tempfile.mkstemp(f"-rank{rank}.txt", "ringopt-", self.folder or None)
            with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(printable("\n".join(lines)) + "\n")
        except OSError as error:
            return f"Its last events could not be written ({error.strerror})"
        return f"Its last {len(self.events)} events are in {path}"


def differences(store: Store, name: str, rank: int, size: int, mine: Call, patience: float) -> str:
    """How the calls of the ranks differ, of those that have published theirs or do so within `patience` seconds: a
    sentence for the error."""
    found: dict[int, Call] = {rank: mine}

    def ask() -> None:
        try:
            publish(store, name, rank, mine, ended=True)
            until = time.monotonic() + patience
            ended = [f"ringopt {name} ended {peer}" for peer in range(size)]
            while not store.check(ended) and time.monotonic() < until:
                time.sleep(PAUSE)
            for peer in range(size):
                if peer != rank and store.check([key := f"ringopt {name} stands {peer}"]):
                    found[peer] = Call.from_json(store.get(key))
        except RuntimeError:  # the process that keeps the store is gone
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience + PATIENCE)
    return differences_of_calls(rank, dict(found))


def publish(store: Store, name: str, rank: int, call: Call, ended: bool = False) -> None:
    """Stores the call of this rank for the others to read when the mesh is aborted; `ended`: it has been. Raises
    RuntimeError where the store is gone."""
    store.set(f"ringopt {name} stands {rank}", json.dumps(asdict(call)))
    if ended:
        store.set(f"ringopt {name} ended {rank}", "")


def differences_of_calls(rank: int, calls: Mapping[int, Call]) -> str:
    """How the calls of the other ranks differ from that of `rank`: a sentence, "" where they do not."""
    mine, found = calls[rank], []
    for peer, call in sorted(calls.items()):
        apart = list(_differences_of(mine, call)) if peer != rank else []
        if apart:
            found.append(f"rank {peer} {call.doing or 'is outside of compiled calls'} with {'; '.join(apart)}")
    return f"This rank {mine.doing or 'is outside of compiled calls'}; {', '.join(found)}" if found else ""


def _differences_of(mine: Call, other: Call) -> Sequence[str]:
    found = []
    if mine.inputs != other.inputs:
        found.append(f"inputs {_listed(other.inputs)} where this rank has {_listed(mine.inputs)}")
    if mine.gradients != other.gradients:
        modes = ("off", "on")
        found.append(f"gradients {modes[other.gradients]} where this rank has them {modes[mine.gradients]}")
    if mine.program != other.program and mine.program and other.program:
        here, there = Counter(mine.operators), Counter(other.operators)
        more, fewer = there - here, here - there
        words = [f"{way} {_listed(tuple(names))}" for way, names in (("also", more), ("without", fewer)) if names]
        found.append(f"another graph ({', '.join(words) or 'of the same operators'})")
    return found


def _listed(words: Sequence[str]) -> str:
    return (", ".join(words[:SHOWN]) + (", ..." if len(words) > SHOWN else "")) or "none"
