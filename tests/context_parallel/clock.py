"""Ranks on a clock in place of a machine: what the executor hides where only blocks and messages take time.

    Clocked.of(attention, heads=(4, 4), head_dim=64, second=..., rate=...)  # p threads; tensors are all zeros

Every rank has a clock of its own. A block moves it on by its pairs of query and key; posting a message costs nothing
(or `handling`), and who waits goes on at the later of its own time and the message's. Between two ranks there is one
link each way, which carries one message after the other from when both ends are posted. The figures depend on nothing
else: they are the same on every machine, however busy, and what a real link gives beyond or below them is the cost of
a processor that moves bytes.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward, backward_until_home, begin
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.rows import count
from ringopt.distributed.mesh import Mesh, Transfer
from ringopt.kernels.base import TileInputs
from ringopt.runtime.trace import Span
from ringopt.tools.benchmarks.lab.sleeping import Idle, pairs

PATIENCE = 60.0  # real seconds until a message that nobody sends is an error


@dataclass
class Channel:
    """One way between two ranks: when its messages were posted at either end, and when each has been carried."""

    sizes: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    carried: list[float] = field(default_factory=list)


class VirtualWorld:
    """What the ranks share. `rate` in bytes a second each way, `handling` in seconds that a rank spends on posting a
    message."""

    def __init__(self, size: int, rate: float, handling: float = 0.0):
        self.size, self.rate, self.handling = size, rate, handling
        self.spans: list[Span] = []
        self.channels: defaultdict[tuple[int, int], Channel] = defaultdict(Channel)
        self.changed = threading.Condition()

    def post(self, channel: tuple[int, int], sends: bool, size: int, now: float) -> int:
        """The number of the message on its channel."""
        with self.changed:
            link = self.channels[channel]
            ends = link.sent if sends else link.received
            ends.append(now)
            if len(ends) > len(link.sizes):
                link.sizes.append(size)
            elif link.sizes[len(ends) - 1] != size:
                raise AssertionError(f"message {len(ends) - 1} of {channel} has {size} bytes on one end only")
            while len(link.carried) < min(len(link.sent), len(link.received)):
                place = len(link.carried)
                begin = max(link.sent[place], link.received[place], link.carried[-1] if place else 0.0)
                link.carried.append(begin + link.sizes[place] / self.rate)
                self.spans.append(Span(channel[0], "link", f"to {channel[1]}", begin, link.carried[-1], size))
            self.changed.notify_all()
            return len(ends) - 1

    def carried(self, channel: tuple[int, int], number: int) -> float:
        """When the message has arrived. Blocks until both of its ends are posted."""
        with self.changed:
            link = self.channels[channel]
            if not self.changed.wait_for(lambda: len(link.carried) > number, PATIENCE):
                raise AssertionError(f"message {number} from rank {channel[0]} to {channel[1]} has no other end")
            return link.carried[number]


class VirtualMesh(Mesh):
    """One rank of a world, with its clock."""

    def __init__(self, world: VirtualWorld, rank: int):
        super().__init__()
        self.world, self._rank, self.now = world, rank, 0.0

    @property
    def name(self) -> str:
        return f"virtual:{self._rank}/{self.size}"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.world.size

    def compute(self, seconds: float, label: str = "") -> None:
        self._until(self.now + seconds, "compute", label)

    def wait_until(self, moment: float, label: str) -> None:
        if moment > self.now:
            self._until(moment, "exposed", label)

    def _until(self, moment: float, lane: str, label: str) -> None:
        self.world.spans.append(Span(self.rank, lane, label, self.now, moment))
        self.now = moment

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        works = []
        for way, ends in ((False, receives), (True, sends)):
            for peer, buffer in ends:
                self.now += self.world.handling
                channel = (self.rank, peer) if way else (peer, self.rank)
                number = self.world.post(channel, way, buffer.nbytes, self.now)
                works.append(Transfer(label, Carried(self, channel, number, label)))
        return works

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        raise NotImplementedError("a virtual clock knows messages, and no collectives")

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        raise NotImplementedError("a virtual clock knows messages, and no collectives")

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        raise NotImplementedError("a virtual clock knows messages, and no collectives")

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        raise NotImplementedError("a virtual clock knows messages, and no collectives")


@dataclass(frozen=True)
class Carried:
    mesh: VirtualMesh
    channel: tuple[int, int]
    number: int
    label: str

    def wait(self) -> None:
        self.mesh.wait_until(self.mesh.world.carried(self.channel, self.number), self.label)


class Clockwork(Idle):
    """Takes `second` seconds for a pair of a query and a key in one head."""

    name = "clockwork"

    def __init__(self, mesh: VirtualMesh, second: float):
        self.mesh, self.second = mesh, second

    def spend(self, tile: TileInputs, backward: bool) -> None:
        self.mesh.compute(pairs(tile) * self.second, f"{tile.q.shape[2]} x {tile.k.shape[2]}")


@dataclass(frozen=True)
class Clocked:
    """One forward or backward on the clock: seconds until the last rank was done, and what each did when."""

    seconds: float
    spans: tuple[Span, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        attention: Attention,
        sizes: tuple[int, int, int, int],
        backward: bool,
        second: float,
        rate: float,
        ahead: float | None = None,
        behind: float | None = None,
    ) -> Clocked:
        """Of q [B, Hq, S, D] and k, v [B, Hkv, S, D] in float32, by `sizes` = (B, Hq, Hkv, D). `ahead`: seconds of
        other work before it, behind which it has started; `behind`: after a backward, behind which it ends."""
        world = VirtualWorld(attention.exchange.ranks, rate)
        meshes = [VirtualMesh(world, rank) for rank in range(world.size)]

        def run(mesh: VirtualMesh) -> float:
            site, given = replace(attention, kernel=Clockwork(mesh, second)), operands(attention, mesh.rank, sizes)
            begun = begin(site, mesh, given.k, given.v, backward) if ahead is not None else ()
            mesh.compute(ahead or 0.0, "other work")
            if backward:
                lse = given.q.new_zeros(given.q.shape[:3])
                saved = Saved(given, given.q, lse)
                if behind is None:
                    attend_backward(site, mesh, given.q, saved, begun)
                else:
                    left = backward_until_home(site, mesh, given.q, saved, begun)
                    mesh.compute(behind, "other work")
                    left.wait()
            else:
                attend(site, mesh, given, begun)
            return mesh.now

        with ThreadPoolExecutor(world.size) as pool:
            return cls(max(pool.map(run, meshes)), tuple(world.spans))


def operands(attention: Attention, rank: int, sizes: tuple[int, int, int, int]) -> Operands:
    """A rank's rows; all zeros."""
    batch, q_heads, kv_heads, dim = sizes
    plan = attention.exchange
    queries, keys = (count(layout.ranges(rank)) for layout in (plan.q_layout, plan.kv_layout))
    q, k = (torch.zeros(batch, *of, dim) for of in ((q_heads, queries), (kv_heads, keys)))
    return Operands(q, k, k)


@dataclass(frozen=True)
class Hidden:
    """Seconds on the clock of the compute without messages, of the messages without compute, and of both."""

    compute: float
    exchange: float
    total: float

    @property
    def share(self) -> float:
        """Of the shorter of the two, the part that the longer hides."""
        return (self.compute + self.exchange - self.total) / min(self.compute, self.exchange)


def hidden(attention: Attention, sizes: tuple[int, int, int, int], backward: bool, share: float) -> Hidden:
    """Where the exchange takes `share` of the compute."""

    def timed(second: float, rate: float) -> Clocked:
        return Clocked.of(attention, sizes, backward, second, rate)

    second = 1.0 / timed(1.0, float("inf")).seconds  # so that the compute takes one second
    rate = timed(0.0, 1.0).seconds / share
    return Hidden(1.0, share, timed(second, rate).seconds)
