"""Where the ranks stood when a mesh ended: the last events of each, in a file, and in what their calls differ.

A rank notes what it does in memory, all the time, for less than a microsecond an event. When an error ends its mesh it
writes that down, and tells the others through the store of the process group in which call it was; what they tell, it
says in the error. The store may not answer, so a thread asks it, which is waited for no longer than PATIENCE.
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
PATIENCE = 1.0  # seconds, for the others to end as well
SHOWN = 6  # inputs, operators

# When, on the monotonic clock; what; of which exchange or call; with which ranks; bytes sent; in which thread.
Noted: TypeAlias = tuple[float, str, str, object, int, int]


@dataclass(frozen=True)
class Call:
    """Of what was compiled. `doing` says whether it is compiled or called; `inputs` are sizes and dtypes."""

    doing: str = ""
    program: str = ""
    inputs: tuple[str, ...] = ()
    gradients: bool = False
    operators: Mapping[str, int] = field(default_factory=dict)


class Recent:
    """The last events of a rank, and the call that it is in. `folder`: where they are to be written; "" leaves that to
    the system."""

    def __init__(self) -> None:
        self.events: deque[Noted] = deque(maxlen=MOST)
        self.call, self.folder = Call(), ""

    def note(self, what: str, label: str, ranks: object = "", sent: int = 0) -> None:
        self.events.append((monotonic(), what, label, ranks, sent, get_ident()))

    def write(self, name: str, rank: int, why: str) -> str:
        """The file, or why there is none, as a sentence of an error."""
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
    """In what the calls of the ranks differ, as far as they have told, or tell within `patience` seconds: as a sentence
    of an error."""
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
                    told = json.loads(store.get(key))
                    found[peer] = Call(**{**told, "inputs": tuple(told["inputs"])})
        except RuntimeError:  # the process that keeps the store is gone
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience + PATIENCE)
    return told_apart(rank, dict(found))


def publish(store: Store, name: str, rank: int, call: Call, ended: bool = False) -> None:
    """For the others to read when the mesh has ended, also if this rank cannot tell them then. Raises RuntimeError."""
    store.set(f"ringopt {name} stands {rank}", json.dumps(asdict(call)))
    if ended:
        store.set(f"ringopt {name} ended {rank}", "")


def told_apart(rank: int, calls: Mapping[int, Call]) -> str:
    mine, said = calls[rank], []
    for peer, call in sorted(calls.items()):
        apart = list(apart_in(mine, call)) if peer != rank else []
        if apart:
            said.append(f"rank {peer} {call.doing or 'is outside of compiled calls'} with {'; '.join(apart)}")
    return f"This rank {mine.doing or 'is outside of compiled calls'}; {', '.join(said)}" if said else ""


def apart_in(mine: Call, other: Call) -> Sequence[str]:
    found = []
    if mine.inputs != other.inputs:
        found.append(f"inputs {shown(other.inputs)} where this rank has {shown(mine.inputs)}")
    if mine.gradients != other.gradients:
        modes = ("off", "on")
        found.append(f"gradients {modes[other.gradients]} where this rank has them {modes[mine.gradients]}")
    if mine.program != other.program and mine.program and other.program:
        here, there = Counter(mine.operators), Counter(other.operators)
        more, fewer = there - here, here - there
        words = [f"{way} {shown(tuple(names))}" for way, names in (("also", more), ("without", fewer)) if names]
        found.append(f"another graph ({', '.join(words) or 'of the same operators'})")
    return found


def shown(words: Sequence[str]) -> str:
    return (", ".join(words[:SHOWN]) + (", ..." if len(words) > SHOWN else "")) or "none"
