"""In which order a rank posts the messages of a plan, and the proof that no order hangs.

NCCL runs what a rank posts in the order in which it was posted, and what was posted together (a batch) ends when all of
its messages have: a batch that waits for a peer holds up all that stand behind it. So it is not enough that each
message has its other end; there must be no circle of ranks, each of which waits behind what another waits for.

    check_order   one rank against those it talks to: its turns ascend, and a batch of one has the turn of the other's.
                  On every rank, and with both ends of each message in one step (prove.check_peers), this implies that
                  the batches of the least turn that is left never wait in vain
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
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


def _fault(what: str) -> PlanError:
    return PlanError(f"order of messages: {what}. This is a fault of ringopt's planner: please report it")
