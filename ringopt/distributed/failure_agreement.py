"""Whether all ranks were cut short at the same message: then none has one that another does not wait for.

An error in the midst of a program may be this rank's alone, or every rank's (an input that all have, a model that
raises). Each says how far it had come, and by what it was stopped, through the store of the process group, which
carries no tensors and so cannot be out of step with those that do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

# Seconds for the others to come to the same error: they have the same work, and perhaps code to compile.
PATIENCE = 10.0
# The same, where it was noticed at the next call: one of them may save or log something before.
PATIENCE_LATER = 60.0
PAUSE = 0.005  # seconds between two looks


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass
class Place:
    """How far a rank has come: programs and collectives that it has begun, messages that it has posted, by peer;
    whether it is `torn`, by an error while one was posted, which may be under way or not; and what kind of `error` cut
    it short."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    collectives: int = 0
    programs: int = 0
    torn: bool = False
    error: str = ""

    @contextmanager
    def posting(self, sends: Sequence[int] = (), receives: Sequence[int] = (), collectives: int = 0) -> Iterator[None]:
        """For what posts messages to and from these peers, and begins as many collectives."""
        self.torn = True
        for count, peers in ((self.sent, sends), (self.received, receives)):
            for peer in peers:
                count[peer] = count.get(peer, 0) + 1
        self.collectives += collectives
        yield
        self.torn = False


def all_alike(
    store: Store, name: str, rank: int, size: int, mine: Place, meanwhile: Callable[[], None], patience: float
) -> bool:
    """Asked by a rank that was cut short, for the time of that `name` that all ranks give it; `meanwhile` moves the
    messages that are under way. False too where not all ranks ask within `patience` seconds of one of them."""
    keys = [f"ringopt {name} {peer}" for peer in range(size)]
    try:
        store.set(keys[rank], json.dumps(asdict(mine)))
        until = time.monotonic() + patience
        while not (all_here := store.check(keys)) and time.monotonic() < until:
            meanwhile()
            time.sleep(PAUSE)
        # The first answer is everybody's: who comes when another has given up may not go on without it.
        if store.compare_set(f"ringopt {name}", "", "all" if all_here else "not all") != b"all":
            return False
        places = [json.loads(store.get(key)) for key in keys]
    except RuntimeError:  # the process that keeps the store is gone
        return False
    return match(places)


def match(places: Sequence[dict[str, object]]) -> bool:
    """Whether each message that one rank has sent is one that the other receives, and all were stopped in the same way
    in the same program."""
    everyone = range(len(places))
    sent, received = ([dict(place[way]) for place in places] for way in ("sent", "received"))  # type: ignore[call-overload]
    fits = all(sent[a].get(str(b), 0) == received[b].get(str(a), 0) for a in everyone for b in everyone)
    alike = {(place["collectives"], place["programs"], place["error"]) for place in places}
    return fits and len(alike) == 1 and not any(place["torn"] for place in places)
