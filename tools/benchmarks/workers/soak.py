"""One rank of `ringopt bench soak`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ringopt.context_parallel.geometry.layouts import Replicated, layout_of
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.context_parallel.plan.plan_of import NAMES
from ringopt.context_parallel.plan.strategies import MERGE
from ringopt.distributed.intra_node import messages as local_links
from ringopt.distributed.lookup import process_mesh
from ringopt.distributed.mesh import Mesh, Transfer, register
from ringopt.errors import OptionError
from ringopt.hardware import devices
from ringopt.tools.benchmarks.lab.inserted import inserted
from ringopt.tools.benchmarks.lab.names import TIMEOUT
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.wrapped import Wrapped

WRONG = 1e-9
LONGEST = 90  # rows
FAMILIAR = 300  # cases that are met again and again
OFTEN = 0.9  # how often, once there are so many
ROUND = 16  # tries until the ranks ask each other for the time
SIDES = (0, 1, 1, 0)  # of q, k, v and the gradient of the output: queries or keys
DIM, SCALE = 8, 8**-0.5
T = TypeVar("T")


class Delayed(Wrapped):
    """`mesh`, late by up to `delay` seconds wherever it talks."""

    def __init__(self, mesh: Mesh, delay: float, seed: int):
        super().__init__(mesh)
        self.delay = delay
        self._random = random.Random(seed)

    def _late(self, talk: Callable[[], T]) -> T:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() * self.delay)
        return talk()

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        return self._late(lambda: self.mesh._post(sends, receives, label))

    def _all_gather(self, x: Tensor, label: str) -> list[Tensor]:
        return self._late(lambda: self.mesh._all_gather(x, label))

    def _all_reduce(self, x: Tensor, label: str) -> Tensor:
        return self._late(lambda: self.mesh._all_reduce(x, label))

    def _start_all_reduce(self, x: Tensor, label: str) -> Transfer:
        return self._late(lambda: self.mesh._start_all_reduce(x, label))

    def _start_all_gather(self, x: Tensor, label: str) -> tuple[list[Tensor], Transfer]:
        return self._late(lambda: self.mesh._start_all_gather(x, label))


@dataclass(frozen=True)
class Drawn:
    """`several`: run as exchanges that take turns, which otherwise only large ones are. Of "merge", every rank has all
    queries."""

    q_length: int
    kv_length: int
    heads: tuple[int, int]
    pattern: str
    layout: str
    strategy: str
    several: bool
    seed: int

    @classmethod
    def of(cls, draw: random.Random, ranks: int) -> Drawn:
        length = draw.randint(2 * ranks, LONGEST)
        other = draw.randint(2 * ranks, LONGEST) if draw.random() < 0.2 else length
        kv_heads = draw.choice((1, 2, 3, 4))
        groups, window = draw.choice((1, 2, 3)), draw.randint(1, LONGEST)
        layout, strategy = draw.choice(("contiguous", "zigzag")), draw.choice(NAMES)
        windows = [f"window({window})", f"window({window},both)"]
        # A row that sees no other: all that needs no exchange.
        pattern = "window(1)" if strategy == "local" else draw.choice(["full", "causal", "causal", *windows])
        heads, several, seed = (kv_heads * groups, kv_heads), draw.random() < 0.5, draw.getrandbits(31)
        return cls(length, other, heads, pattern, layout, strategy, several, seed)

    @property
    def layouts(self) -> tuple[str, str]:
        """Of queries, of keys."""
        return Replicated.name if self.strategy == MERGE else self.layout, self.layout

    def sharded(self, ranks: int) -> ShardedPattern:
        queries, keys = self.layouts
        return ShardedPattern(self.pattern, self.q_length, self.kv_length, ranks, queries, keys)

    def operands(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, whole."""
        generator = torch.Generator().manual_seed(self.seed)
        sizes = zip((*self.heads, self.heads[1], self.heads[0]), SIDES, strict=True)
        lengths = (self.q_length, self.kv_length)
        return [
            torch.randn(1, heads, lengths[side], DIM, dtype=torch.float64, generator=generator) for heads, side in sizes
        ]


class Case:
    """What was drawn, with this rank's rows of the operands and of what they should give."""

    def __init__(self, drawn: Drawn, mesh: Mesh):
        self.drawn = drawn
        q, k, v, self._dout = (rows(x, side, drawn, mesh) for x, side in zip(drawn.operands(), SIDES, strict=True))
        self._leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        sides = (SIDES[3], *SIDES[:3])
        self._expected = [rows(x, side, drawn, mesh) for x, side in zip(on_one(drawn), sides, strict=True)]

    def error(self, mesh: Mesh) -> float:
        """Of one forward and backward. Raises OptionError, on all ranks alike and before the first message, where the
        strategy cannot do it."""
        drawn = self.drawn
        attend = inserted(drawn.sharded(mesh.size), drawn.strategy, SCALE, mesh.name)
        limits = replace(devices.OF_CORES, message=1) if drawn.several else devices.OF_CORES
        with patch.object(devices, "OF_CORES", limits):
            out = attend(*self._leaves)
            dq, dk, dv = torch.autograd.grad(out, self._leaves, self._dout)
        if drawn.strategy == MERGE:
            dq = mesh.all_reduce(dq, "dq")
        # As one tensor: where a row sees itself alone, dq and dk are 0 but for the rounding.
        return distance([flat([out.detach(), dq, dk, dv])], [flat(self._expected)])


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """All elements of the tensors, in one dim."""
    return torch.cat([x.reshape(-1) for x in tensors])


def rows(x: Tensor, side: int, drawn: Drawn, mesh: Mesh) -> Tensor:
    """Those of this rank, of the queries (`side` 0) or the keys (1)."""
    layout = layout_of(drawn.layouts[side], x.shape[2], mesh.size)
    return torch.cat([x[:, :, own.start : own.stop] for own in layout.ranges(mesh.rank)], 2)


class Cases:
    """Cases without end, the same on all ranks. As in training, most are of sizes met before, of which the ranks have
    compared their calls and proved their plans; the others are met once."""

    def __init__(self, seed: int, mesh: Mesh):
        self._draw, self._mesh = random.Random(seed), mesh
        self._met: list[Case] = []

    def next(self) -> Case:
        if len(self._met) >= FAMILIAR and self._draw.random() < OFTEN:
            return self._draw.choice(self._met)
        return Case(Drawn.of(self._draw, self._mesh.size), self._mesh)

    def right(self, case: Case) -> None:
        """To be met again."""
        if len(self._met) < FAMILIAR:
            self._met.append(case)


def soaked(
    rank: int, ranks: int, steps: int, seconds: float, delay: float, seed: int, compiled: bool = False
) -> list[Row]:
    """A row for each strategy."""
    from ringopt.tools.benchmarks.models.soak_models import Models  # which stands on this module

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = Delayed(process_mesh(None, TIMEOUT), delay, seed + rank)
    register(mesh)
    rows = {name: Row(strategy=name, steps=0, refused=0, wrong=0, error=0.0, longest=0.0) for name in NAMES}
    cases: Any = Models(seed, mesh) if compiled else Cases(seed, mesh.mesh)
    begin = time.monotonic()
    done = tried = 0
    while done < steps and (tried % ROUND or not over(mesh, time.monotonic() - begin > seconds)):
        case, tried = cases.next(), tried + 1
        row, start = rows[case.drawn.strategy], time.monotonic()
        # Every other time the messages between ranks on one node are those of long ones, which a receiver fetches.
        short = local_links.SHORT if tried % 2 else 0
        try:
            with patch.object(local_links, "SHORT", short):
                far = case.error(mesh)
        except OptionError:
            row["refused"] += 1
            continue
        cases.right(case)
        row["steps"] += 1
        row["wrong"] += far > WRONG
        row["error"] = max(row["error"], far)
        row["longest"] = max(row["longest"], time.monotonic() - start)
        done += 1
    return list(rows.values())


def over(mesh: Mesh, mine: bool) -> bool:
    """Whether time is up for any rank."""
    return float(mesh.all_reduce(torch.tensor(float(mine)), "over")) > 0


def on_one(case: Drawn) -> list[Tensor]:
    """The same of all rows, written out."""
    q, k, v, dout = case.operands()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    visible = seen(pattern_of(case.pattern, case.q_length, case.kv_length), range(case.q_length), range(case.kv_length))
    keys, values = (x.repeat_interleave(case.heads[0] // case.heads[1], 1) for x in leaves[1:])
    scores = (leaves[0] @ keys.mT * SCALE).masked_fill(~visible, -torch.inf)
    blind = ~visible.any(-1, keepdim=True)
    out = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]
