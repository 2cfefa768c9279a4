"""Messages of a plan under way, and the loop in which rows go out and sums of them come home."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from ringopt.context_parallel.executor.buffers import Gradients, Held, Packed
from ringopt.context_parallel.plan.exchange import Block, Cargo, Message, Step
from ringopt.distributed.mesh import Mesh, Pending
from ringopt.distributed.traffic import log_event


@dataclass(frozen=True)
class Posted:
    """Messages under way: the buffers of those that come, and what to wait for."""

    arriving: list[Packed]
    pending: Pending

    def wait(self) -> Iterator[Packed]:
        """What has come, no longer held here. Raises RingCommError."""
        self.pending.wait()
        while self.arriving:
            yield self.arriving.pop(0)


def post(mesh: Mesh, step: Step, cargo: Cargo, source: Held | Gradients, label: str) -> Posted:
    """Starts the messages of a step that carry `cargo`; `source` has what leaves."""
    coming = [message for message in step.receives if message.cargo is cargo]
    arriving = [source.shape.empty(message.rows) for message in coming]
    sends = [(message.target, source.take(message)) for message in step.sends if message.cargo is cargo]
    receives = [(message.source, packed.flat) for message, packed in zip(coming, arriving, strict=True)]
    return Posted(arriving, mesh.exchange(sends, receives, label))


def there_and_back(
    mesh: Mesh,
    steps: Sequence[Step],
    held: Held,
    sums: Gradients,
    compute: Callable[[Block], None],
    way: str,
    group: str = "",
    first: Posted | None = None,
) -> Generator[None, None, list[Posted]]:
    """Runs steps in which rows travel out (`held`) and sums of them back home. Stops when it has posted the first
    messages (unless they were, as `first`), and wherever it would wait; ends when all is computed, with the last sums
    still on their way here: for the caller to give to `deliver`.

    Sums leave as soon as nothing is added to them any more, before the rank turns to other exchanges; they are waited
    for a whole step later, or with all computed in the end.
    """
    coming: Posted | None = None  # sums that the step's own are added to
    for number, step in enumerate(steps):
        label = f"{way} {number}{group}"
        if number == 0 and first is not None:
            rows = first
        else:
            rows = post(mesh, step, Cargo.OUT, held, label)
            if number == 0:
                yield
        for block in step.blocks:
            compute(block)
        if step.blocks:
            log_event("computed", label, mesh.teller)
        if number + 1 == len(steps):
            return [posted for posted in (coming, rows) if posted is not None]
        if coming is not None:
            deliver(coming, sums.arrived)
        coming = post(mesh, steps[number + 1], Cargo.BACK, sums, f"{way} {number + 1}, home{group}")
        yield
        deliver(rows, held.put)
        held.drop(step.drops)
    return []


def deliver(posted: Posted, take: Callable[[Packed], None]) -> None:
    """Gives `take` what comes. A function of its own, so that its last buffer is not kept by the loop that calls it."""
    for packed in posted.wait():
        take(packed)


def leaving(steps: Sequence[Step]) -> list[Message]:
    """The messages that carry sums home, in order."""
    return [message for step in steps for message in step.sends if message.cargo is Cargo.BACK]
