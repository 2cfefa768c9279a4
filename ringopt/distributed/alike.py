"""Whether all ranks were cut short at the same message: then none has one that another does not wait for.

An error in the midst of a program may be this rank's alone, or every rank's (an input that all have, a model that
raises). Each says how far it had come through the store of the process group, which carries no tensors and so cannot be
out of step with those that do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

# Seconds for the others to come to the same error: they have the same work, and perhaps code to compile.
PATIENCE = 10.0
PAUSE = 0.005  # seconds between two looks


class Store(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Place:
    """How far a rank has come: messages that it has posted, by peer, and collectives that it has begun."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    collectives: int = 0

    def posted(self, sends: Sequence[int], receives: Sequence[int]) -> None:
        """To and from these peers."""
        for count, peers in ((self.sent, sends), (self.received, receives)):
            for peer in peers:
                count[peer] = count.get(peer, 0) + 1


def all_alike(store: Store, name: str, rank: int, size: int, mine: Place, meanwhile: Callable[[], None]) -> bool:
    """Asked by a rank that was cut short, for the time of that `name` that all ranks give it; `meanwhile` moves the
    messages that are under way. False too where not all ranks ask within PATIENCE."""
    keys = [f"ringopt {name} {peer}" for peer in range(size)]
    try:
        store.set(keys[rank], json.dumps(asdict(mine)))
        until = time.monotonic() + PATIENCE
        while not store.check(keys):
            if time.monotonic() > until:
                return False
            meanwhile()
            time.sleep(PAUSE)
        places = [json.loads(store.get(key)) for key in keys]
    except RuntimeError:  # the process that keeps the store is gone
        return False
    return match(places)


def match(places: Sequence[dict[str, object]]) -> bool:
    """Whether each message that one rank has sent is one that the other receives."""
    everyone = range(len(places))
    sent, received = ([dict(place[way]) for place in places] for way in ("sent", "received"))  # type: ignore[call-overload]
    fits = all(sent[a].get(str(b), 0) == received[b].get(str(a), 0) for a in everyone for b in everyone)
    return fits and len({place["collectives"] for place in places}) == 1
