"""K and V of the segments that are cut, on their way: what a rank sends and keeps of each term.

They can begin before there are queries: `begin_dilated` posts the first messages of all terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ringopt.context_parallel.executor.buffers import Held, KVShape, Local, Packed
from ringopt.context_parallel.executor.dilated_views import of_heads, packed
from ringopt.context_parallel.plan.dilated import DilatedPlan, Piece, TermPlan
from ringopt.context_parallel.plan.exchange import Message, Step
from ringopt.distributed.mesh import Mesh, Pending

Buffers = list[tuple[int, Tensor]]
Arriving = list[tuple[Message, Packed]]


class Keys:
    """Of one term: this rank's rows of the segments that lie across edges of the shards, and what has come of others.
    `steps` are those of the forward, unless somebody sets them."""

    def __init__(self, part: TermPlan, rank: int, k: Tensor, v: Tensor):
        assert part.exchange is not None
        self.part, self.term, self.exchange, self.rank = part, part.term, part.exchange, rank
        self.pieces: tuple[Piece, ...] = part.pieces(rank)
        self.steps: tuple[Step, ...] = self.exchange.forward(rank)
        self.local = Local(self.exchange.q_layout.ranges(rank))
        self.k, self.v = (self._packed(x, self.term.kv_heads) for x in (k, v))
        shape = KVShape.of(self.k, self.v)
        self.held = Held(shape, self.exchange.kv_pieces(rank), self.local, self.k, self.v)
        self.arriving: Arriving = []

    def post(self, number: int) -> tuple[Buffers, Buffers]:
        """What is sent and received in a step."""
        step = self._step(number)
        self.arriving = [(message, self._shape(message).empty(message.rows)) for message in step.receives]
        sends = [(message.target, self._outgoing(message)) for message in step.sends]
        return sends, [(message.source, new.flat) for message, new in self.arriving]

    def end(self, number: int) -> None:
        """When the messages of a step are there."""
        while self.arriving:  # a list that others hold too
            self._keep(*self.arriving.pop(0))
        self.held.drop(self._step(number).drops)

    def _packed(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        return packed(of_heads(x, heads), self.pieces)

    def _step(self, number: int) -> Step:
        return self.steps[number] if number < len(self.steps) else Step()

    def _shape(self, message: Message) -> KVShape:
        return self.held.shape

    def _outgoing(self, message: Message) -> Tensor:
        return self.held.take(message)

    def _keep(self, message: Message, buffer: Packed) -> None:
        self.held.put(buffer)


@dataclass(frozen=True)
class Begun:
    """The first messages under way: by term what comes, and what to wait for."""

    arriving: Sequence[Arriving]
    pending: Pending


def begin_dilated(plan: DilatedPlan, mesh: Mesh, k: Tensor, v: Tensor, backward: bool) -> Begun:
    """Posts the first messages of `attend_dilated` or of its backward, which are to be handed on to it: K and V are all
    that they carry."""
    label = ("forward again" if plan.dilation.torchscale_mixing else "backward") if backward else "forward"
    keys = [Keys(part, mesh.rank, k, v) for part in plan.terms if part.exchange is not None]
    if label == "backward":
        for one in keys:
            one.steps = one.exchange.backward(mesh.rank)
    return post_all(mesh, keys, 0, label)


def post_all(mesh: Mesh, keys: Sequence[Keys], number: int, label: str) -> Begun:
    """A step of all terms at once."""
    sends: Buffers = []
    receives: Buffers = []
    for one in keys:
        outgoing, incoming = one.post(number)
        sends += outgoing
        receives += incoming
    return Begun([one.arriving for one in keys], mesh.exchange(sends, receives, f"{label} {number}"))
