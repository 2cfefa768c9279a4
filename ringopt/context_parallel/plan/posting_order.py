"""In which order a rank posts the messages of a plan, and the proof that no order hangs.

NCCL runs what a rank posts in the order in which it was posted, and what was posted together (a batch) ends when all of
its messages have: a batch that waits for a peer holds up all that stand behind it. So it is not enough that each
message has its other end; there must be no circle of ranks, each of which waits behind what another waits for.

    check_order   one rank against those it talks to: its turns ascend, and a batch of one has the turn of the other's.
                  On every rank, and with both ends of each message in one step (prove.check_peers), this implies that
                  the batches of the least turn that is left never wait in vain
    run_in_order  the batches of all ranks, in order, as NCCL would run them; for tests
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringopt.context_parallel.plan.exchange import Cargo, Exchange, Message, Step
from ringopt.errors import PlanError

# Round of the loops, which exchange, and 0 for rows, 1 for the sums that leave for the next step.
Turn = tuple[int, int, int]


@dataclass(frozen=True)
class Batch:
    """Messages that one rank posts together. Those of different exchanges are never each other's ends."""

    turn: Turn
    messages: tuple[Message, ...]

    def peers(self, rank: int) -> set[int]:
        """Those that `rank`, whose batch it is, talks to."""
        return {one.target if one.source == rank else one.source for one in self.messages}


BatchesOf = Callable[[int], Sequence[Batch]]


def batches(exchanges: Sequence[Exchange], rank: int, backward: bool) -> tuple[Batch, ...]:
    """What `rank` posts for exchanges that take turns (executor/loop.py, executor/interleave.py), in order: the rows of
    the first step of each; then, by turns, the rows of the next step, and the sums that leave before the step after."""
    steps = [exchange.steps(rank, backward) or (Step(),) for exchange in exchanges]
    found = [_batch((-1, i, 0), each[0], Cargo.OUT) for i, each in enumerate(steps)]
    for number in range(max(map(len, steps), default=0)):
        for i, each in enumerate(steps):
            if 0 < number < len(each):
                found.append(_batch((number, i, 0), each[number], Cargo.OUT))
            if number + 1 < len(each):
                found.append(_batch((number, i, 1), each[number + 1], Cargo.BACK))
    return tuple(batch for batch in found if batch.messages)


def _batch(turn: Turn, step: Step, cargo: Cargo) -> Batch:
    return Batch(turn, tuple(one for one in (*step.receives, *step.sends) if one.cargo is cargo))


def check_order(rank: int, batches_of: BatchesOf) -> None:
    """Raises PlanError where what `rank` posts could wait for ever."""
    mine = batches_of(rank)
    for before, after in pairwise(mine):
        if before.turn >= after.turn:
            raise _fault(f"rank {rank} posts turn {after.turn} behind turn {before.turn}")
    turns = defaultdict[int, list[Turn]](list)
    for batch in mine:
        for peer in batch.peers(rank):
            turns[peer].append(batch.turn)
    for peer, shared in turns.items():
        theirs = [batch.turn for batch in batches_of(peer) if rank in batch.peers(peer)]
        if shared != theirs:
            raise _fault(f"ranks {rank} and {peer} meet in turns {shared} of one and {theirs} of the other")


def run_in_order(posted: Sequence[Sequence[Batch]]) -> None:
    """A message moves while the batches of both of its ends are the first that are left of their ranks. Raises
    PlanError where none moves and some are left."""
    left = [list(_open(batches)) for batches in posted]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(left):
            if queue:
                first = queue[0]
                met = {(kind, one) for kind, one in first if _at_head(left, _other(one, rank), (kind, one))}
                for kind, one in met:
                    first.discard((kind, one))
                    left[_other(one, rank)][0].discard((kind, one))
                if not first:
                    queue.pop(0)
                moved = moved or bool(met) or not first
    stuck = {rank: sorted(str(one) for _, one in queue[0]) for rank, queue in enumerate(left) if queue}
    if stuck:
        raise _fault(f"all of these ranks wait, each behind its first batch: {stuck}")


def _open(posted: Sequence[Batch]) -> Iterator[set[tuple[int, Message]]]:
    return ({(batch.turn[1], one) for one in batch.messages} for batch in posted)


def _other(message: Message, rank: int) -> int:
    return message.target if message.source == rank else message.source


def _at_head(left: list[list[set[tuple[int, Message]]]], peer: int, end: tuple[int, Message]) -> bool:
    return bool(left[peer]) and end in left[peer][0]


def _fault(what: str) -> PlanError:
    return PlanError(f"order of messages: {what}. This is a fault of ringopt's planner: please report it")
