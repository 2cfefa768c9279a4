"""Whether all ranks failed at the same message, so that the mesh can still be used.

An error within a program may be of this rank alone, or of all ranks (a bad input, a model that raises). Each rank
publishes its progress and its error in the store of the process group, which carries no tensors and so cannot be out
of step with those that do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Protocol

# Seconds for the other ranks to reach the same error: they have the same work, and perhaps code to compile.
PATIENCE = 10.0
# The same, where the error was noticed at the next call: other ranks may save or log something before it.
PATIENCE_LATER = 60.0
PAUSE = 0.005  # seconds between two looks


class Store(Protocol):
    """The methods of torch.distributed.Store that are used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass
class Place:
    """The progress of a rank: programs and collectives begun, messages posted, by peer; whether it is `torn`, by an
    error while a message was being posted, which may have been sent or not; and the type of the `error`."""

    sent: dict[int, int] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    collectives: int = 0
    programs: int = 0
    torn: bool = False
    error: str = ""

    @contextmanager
    def posting(self, sends: Sequence[int] = (), receives: Sequence[int] = (), collectives: int = 0) -> Iterator[None]:
        """Counts messages to and from these peers, and `collectives`; an error within leaves the rank torn."""
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
    """Whether all ranks failed alike (see `match`). Called by a rank that failed, under a `name` that all ranks give to
    this failure; `meanwhile` serves messages in flight. False too where not all ranks call within `patience`
    seconds."""
    keys = [f"ringopt {name} {peer}" for peer in range(size)]
    try:
        store.set(keys[rank], json.dumps(asdict(mine)))
        until = time.monotonic() + patience
        while not (all_here := store.check(keys)) and time.monotonic() < until:
            meanwhile()
            time.sleep(PAUSE)
        # The first answer holds for all ranks: one that comes after another has given up must not go on alone.
        if store.compare_set(f"ringopt {name}", "", "all" if all_here else "not all") != b"all":
            return False
        places = [json.loads(store.get(key)) for key in keys]
    except RuntimeError:  # the process that keeps the store is gone
        return False
    return match(places)


def match(places: Sequence[dict[str, object]]) -> bool:
    """Whether every message sent is one that its peer receives, and all ranks failed with the same error in the same
    program."""
    everyone = range(len(places))
    sent, received = ([dict(place[way]) for place in places] for way in ("sent", "received"))  # type: ignore[call-overload]
    fits = all(sent[a].get(str(b), 0) == received[b].get(str(a), 0) for a in everyone for b in everyone)
    alike = {(place["collectives"], place["programs"], place["error"]) for place in places}
    return fits and len(alike) == 1 and not any(place["torn"] for place in places)
