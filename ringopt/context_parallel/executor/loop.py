"""The loop that runs a plan on one rank, forward and backward, whatever travels:

    for each step:  post receives and sends | compute the blocks at hand | wait | merge what came | drop

Ring attention (Liu et al. 2023) is this loop over a plan in which everybody sends K and V to the next rank. What
differs is in the plan (plan/exchange.py) and in a `Task`: what is packed into a message, what a block computes, where
its result is merged. Keys and values travel (keys_move.py), queries do (queries_move.py), or those of several dilated
terms at once (dilated/cut.py); where heads are traded (heads_move.py), this is what runs between the trades.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ringopt.context_parallel.executor.buffers import Gradients, Held, KVShape, Packed
from ringopt.context_parallel.plan.exchange import Block, Cargo, Message, Step
from ringopt.distributed.mesh import Mesh, Pending
from ringopt.distributed.traffic import log_event


def run_plan(run: Run, first: Posted | None = None) -> Generator[None, None, LastMessages]:
    """Runs the steps of a plan; `first`: the messages of the first step, where they were posted before. Stops wherever
    it would wait, for other exchanges to compute meanwhile, and ends when all is computed: what is then still under
    way (sums on their way here, rows on their way out) is for the caller to wait for.

    Sums leave as soon as nothing is added to them any more, which is before the step that they belong to, and are
    waited for a whole step later.
    """
    sums, last = None, list[Posted]()
    for number in range(run.length):
        rows = first if number == 0 and first is not None else run.post_rows(number)
        run.compute(number)
        if number + 1 < run.length:
            if sums is not None:
                deliver(sums, run.stores)
            sums = run.post_sums(number + 1)
            yield
            deliver(rows, run.stores)
        else:
            last = [posted for posted in (sums, rows) if posted is not None]
        run.drop(number)
    return LastMessages(last, [{cargo: at for cargo, at in each.items() if cargo is BACK} for each in run.stores])


# ---- what the loop asks ----------------------------------------------------------------------------------------------
OUT, BACK = Cargo.OUT, Cargo.BACK


class Store(Protocol):
    """Where on this rank lies what a message carries: Held or Gradients (buffers.py)."""

    shape: KVShape

    def take(self, message: Message) -> Tensor:
        """The buffer to send: nothing writes to it before the message has left."""

    def put(self, packed: Packed) -> None:
        """Takes over a buffer that has arrived: rows are used in place until they are dropped, sums are added."""


Stores = Mapping[Cargo, Store]


class Task(ABC):
    """One attention, forward or backward, on one rank.

    steps   what the plan has the rank do
    held    rows that travel: the rank's own, and what has arrived of others
    sums    of what is made of them, on their way home; None where all is merged here
    """

    steps: Sequence[Step]
    held: Held
    sums: Gradients | None = None

    @abstractmethod
    def compute(self, block: Block) -> None:
        """Computes a block whose rows are here, tile by tile, and merges what it gives. After every tile the mesh
        looks after its messages (`Mesh.attend`)."""

    def computed(self) -> None:
        """The blocks of a step are computed."""
        return

    def step(self, number: int) -> Step:
        return self.steps[number] if number < len(self.steps) else Step()

    @property
    def stores(self) -> Stores:
        return {OUT: self.held} if self.sums is None else {OUT: self.held, BACK: self.sums}


@dataclass(frozen=True)
class Run:
    """One plan on one rank; or several, a step of each at a time, whose messages of a step are under way together.

    way     what it is, in labels: "forward"
    name    which of several such, in labels
    joined  sums leave with the rows of their step, not as soon as they can
    """

    mesh: Mesh
    tasks: Sequence[Task]
    way: str
    name: str = ""
    joined: bool = False

    @property
    def length(self) -> int:
        return max((len(task.steps) for task in self.tasks), default=0)

    @property
    def stores(self) -> list[Stores]:
        return [task.stores for task in self.tasks]

    def post_rows(self, number: int) -> Posted:
        stores = [task.stores if self.joined else {OUT: task.stores[OUT]} for task in self.tasks]
        return self._post(number, stores, f"{self.way} {number}{self.name}")

    def post_sums(self, number: int) -> Posted | None:
        if self.joined or not any(BACK in task.stores for task in self.tasks):
            return None
        return self._post(
            number, [{BACK: task.stores[BACK]} for task in self.tasks], f"{self.way} {number}, home{self.name}"
        )

    def _post(self, number: int, stores: Sequence[Stores], label: str) -> Posted:
        return post(self.mesh, [(task.step(number), at) for task, at in zip(self.tasks, stores, strict=True)], label)

    def compute(self, number: int) -> None:
        blocks = [(task, block) for task in self.tasks for block in task.step(number).blocks]
        for task, block in blocks:
            task.compute(block)
        for task in self.tasks:
            task.computed()
        if blocks:
            log_event("computed", f"{self.way} {number}{self.name}", self.mesh.logging_rank)

    def drop(self, number: int) -> None:
        for task in self.tasks:
            task.held.drop(task.step(number).drops)


# ---- messages --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Posted:
    """Messages under way: the buffers of those that come, each with the number of its task and what it carries; and
    what to wait for."""

    arriving: list[tuple[int, Cargo, Packed]]
    pending: Pending

    def wait(self) -> Iterator[tuple[int, Cargo, Packed]]:
        """What has come, no longer held here. Raises RingCommError."""
        self.pending.wait()
        while self.arriving:
            yield self.arriving.pop(0)


def post(mesh: Mesh, steps: Sequence[tuple[Step, Stores]], label: str) -> Posted:
    """Starts the messages of a step of each task: those for whose cargo a store is given."""
    arriving: list[tuple[int, Cargo, Packed]] = []
    sends: list[tuple[int, Tensor]] = []
    receives: list[tuple[int, Tensor]] = []
    for task, (step, stores) in enumerate(steps):
        for message in step.receives:
            if message.cargo in stores:
                packed = stores[message.cargo].shape.empty(message.rows)
                arriving.append((task, message.cargo, packed))
                receives.append((message.source, packed.flat))
        leaving = [message for message in step.sends if message.cargo in stores]
        sends += [(message.target, stores[message.cargo].take(message)) for message in leaving]
    return Posted(arriving, mesh.exchange(sends, receives, label))


def deliver(posted: Posted, stores: Sequence[Stores]) -> None:
    """Waits, and merges what comes. A function of its own, so that its last buffer is not kept by the loop that calls
    it. Raises RingCommError."""
    for task, cargo, packed in posted.wait():
        stores[task][cargo].put(packed)


@dataclass(frozen=True)
class LastMessages:
    """What is under way when all is computed: of each task the store of its sums, and nothing else of it, is held."""

    posted: list[Posted]
    stores: Sequence[Stores]

    @property
    def pending(self) -> list[Pending]:
        return [posted.pending for posted in self.posted]

    def arrive(self) -> None:
        """Once. Raises RingCommError."""
        while self.posted:
            deliver(self.posted.pop(0), self.stores)


def leaving(steps: Sequence[Step]) -> list[Message]:
    """The messages that carry sums home, in order."""
    return [message for step in steps for message in step.sends if message.cargo is BACK]
