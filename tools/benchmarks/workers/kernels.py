"""Kernels on one device, beside SDPA: seconds and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.context_parallel.executor.merge_lse import Merged, merge_
from ringopt.context_parallel.geometry.pattern import Kind
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.exchange import Block, Exchange
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.kernels.base import Kernel, TileInputs, WholeRows, accumulator
from ringopt.kernels.choose import KERNELS, choose_kernel
from ringopt.tools.benchmarks.lab.copying import Copy
from ringopt.tools.benchmarks.lab.names import COPY, RING
from ringopt.tools.benchmarks.lab.numbers import distance
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.timing import interleaved

DIM = 64
SCALE = DIM**-0.5
EXACT = 4096  # tokens up to which the reference is computed in float64
SDPA = "sdpa"
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
Run = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class KernelCase:
    """One attention that kernels are timed on; `heads`: of queries and of KV, `length` in tokens."""

    pattern: str
    length: int
    heads: tuple[int, int]
    dtype: str
    device: str
    ranks: int

    @property
    def causal(self) -> bool:
        return self.pattern == "causal"

    def operands(self) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(0)
        hq, hkv = self.heads
        given = [torch.randn(1, heads, self.length, DIM, generator=generator) for heads in (hq, hkv, hkv, hq)]
        return [x.to(self.device, getattr(torch, self.dtype)) for x in given]


@dataclass
class Contest:
    """What is timed of one case, by name, beside SDPA; and what it gives."""

    case: KernelCase
    forward: dict[str, Run]
    backward: dict[str, Run]
    errors: dict[str, float]
    expected: list[Tensor]

    def enter(self, name: str, entrant: Callable[[], tuple[Run, Run]]) -> str:
        """Runs it once. Why it cannot take part, or ""."""
        try:
            forward, backward = entrant()
            self.errors[name] = distance([*forward(), *backward()], self.expected)
        except torch.OutOfMemoryError:
            return f"{name} runs out of memory at {self.case.length:,} tokens, {self.case.pattern}"
        self.forward[name], self.backward[name] = forward, backward
        return ""

    def row(self, name: str, seconds: Sequence[dict[str, float]]) -> Row:
        """`seconds` of forwards and of backwards."""
        case, (forward, backward) = self.case, seconds
        row = {**asdict(case), "heads": "{}/{}".format(*case.heads), "kernel": name, "error": self.errors[name]}
        for way, of_way in (("forward", forward), ("backward", backward)):
            row |= {f"{way}_seconds": of_way[name], f"{way}_ratio": of_way[name] / of_way[SDPA]}
        row["rate"] = (forward[SDPA] + backward[SDPA]) / (forward[name] + backward[name])
        return row | {"part_seconds": None, "copy_rate": None, "hidden": None}


def rows_of(case: KernelCase, names: Sequence[str], repeats: int, refusals: dict[str, str]) -> list[Row]:
    """A row for each of `names` that can do it; `refusals` gets the others."""
    q, k, v, dout = case.operands()
    alone: tuple[Run, Run] = (lambda: [sdpa(case, q, k, v)], backward_of_sdpa(case, q, k, v, dout))
    contest = Contest(case, {SDPA: alone[0]}, {SDPA: alone[1]}, {}, reference(case, q, k, v, dout))
    for kernel in (kernel for kernel in KERNELS if kernel.name in names):
        refusal = kernel.supports(q.dtype, q.device, DIM, DIM)
        if refusal is not None:
            refusals[kernel.name] = refusal.sentence
        elif why := contest.enter(kernel.name, partial(of_kernel, case, kernel, (q, k, v, dout))):
            refusals[why] = why
    rings: list[VirtualRing] = []
    if RING in names:
        entrant = partial(of_ring, case, (q, k, v, dout), rings)
        if why := contest.enter(f"ring of {case.ranks}", entrant):
            refusals[why] = why
    copy = Copy([k, v])
    if COPY in names:
        copy.last(synchronized(case, alone[0]), partial(synchronized, case))
        contest.enter(COPY, lambda: (lambda: copy.during(alone[0]), lambda: copy.during(alone[1])))
        contest.errors[COPY] = max(contest.errors[COPY], distance(copy.targets, [k, v]))
    seconds = [
        interleaved({name: synchronized(case, run) for name, run in runs.items()}, repeats)
        for runs in (contest.forward, contest.backward)
    ]
    rows = [contest.row(name, seconds) for name in contest.errors]
    for row in rows:
        if rings and row["kernel"] == f"ring of {case.ranks}":
            row["part_seconds"] = interleaved({"merge": synchronized(case, rings[0].merge)}, repeats)["merge"]
        if row["kernel"] == COPY:
            copying = interleaved({"copy": synchronized(case, copy.alone)}, repeats)["copy"]
            row |= copy_figures(copying, copy.nbytes, seconds)
    return rows


def copy_figures(alone: float, copied: int, seconds: Sequence[dict[str, float]]) -> Row:
    """Of a copy that takes so long without compute: its rate, and how much of the shorter of the two is hidden, forward
    and backward."""
    both, ours = (sum(of_way[name] for of_way in seconds) for name in (COPY, SDPA))
    shorter = sum(min(of_way[SDPA], alone) for of_way in seconds)
    return {"part_seconds": alone, "copy_rate": copied / alone, "hidden": (ours + 2 * alone - both) / shorter}


def of_kernel(case: KernelCase, kernel: Kernel, given: Sequence[Tensor]) -> tuple[Run, Run]:
    """Calls of a kernel's forward and backward on one tile that is the whole attention."""
    q, k, v, dout = given
    tile = TileInputs(q, k, v, SCALE, causal=case.causal)
    out, lse = kernel.forward(tile)
    rows = WholeRows(dout, out.to(q.dtype), lse)
    return (
        lambda: list(kernel.forward(tile)[:1]),
        lambda: list(kernel.backward(tile, rows)),
    )


def of_ring(case: KernelCase, given: Sequence[Tensor], rings: list[VirtualRing]) -> tuple[Run, Run]:
    """`rings` is given the ring."""
    q = given[0]
    ring = VirtualRing(case, choose_kernel("auto", q.dtype, q.device, DIM, DIM)[0], given)
    rings.append(ring)
    return ring.forward, ring.backward


def sdpa(case: KernelCase, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SDPA on the same operands, q, k, v [B, H, S, D]."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1]
    )


def backward_of_sdpa(case: KernelCase, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Run:
    """A call of SDPA's backward alone."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sdpa(case, *leaves)
    return lambda: list(torch.autograd.grad(out, leaves, dout, retain_graph=True))


def reference(case: KernelCase, *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    q, k, v, dout = given if case.length > EXACT else [x.double() for x in given]
    found = [sdpa(case, q, k, v), *backward_of_sdpa(case, q, k, v, dout)()]
    return [x.to(given[0].dtype) for x in found]


def synchronized(case: KernelCase, run: Callable[[], object]) -> Callable[[], object]:
    """`run`, which on a GPU waits for its kernels."""
    if case.device != "cuda":
        return run

    def call() -> None:
        run()
        torch.cuda.synchronize()

    return call


class VirtualRing:
    """The blocks of a ring's ranks, one rank after the other, all tokens on this device."""

    def __init__(self, case: KernelCase, kernel: Kernel, given: Sequence[Tensor]):
        layout = "zigzag" if case.causal else "contiguous"
        sharded = ShardedPattern.of_self_attention(case.pattern, case.length, case.ranks, layout)
        self.plan: Exchange = exchange_of(sharded, "ring")
        self.kernel = kernel
        self.q, self.k, self.v, self.dout = given
        self.blocks = [
            [block for step in self.plan.forward(rank) for block in step.blocks] for rank in range(case.ranks)
        ]
        self.saved = self._forward()

    def forward(self) -> list[Tensor]:
        return [self._forward()[0]]

    def _forward(self) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(self.q)
        lse = self.q.new_empty(self.q.shape[:3], dtype=accumulator(self.q.dtype))
        for rank, blocks in enumerate(self.blocks):
            pieces = self.plan.q_layout.ranges(rank)
            q = torch.cat([rows(self.q, piece) for piece in pieces], 2)
            merged = Merged(q, DIM)
            for block in blocks:
                merged.add(place(pieces, block.queries), *self.kernel.forward(self._tile(block)))
            for whole, part in zip((out, lse), merged.result(), strict=True):
                for piece in pieces:
                    rows(whole, piece).copy_(part[:, :, place(pieces, piece)])
        return out, lse

    def backward(self) -> list[Tensor]:
        out, lse = self.saved
        totals = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (self.q, self.k, self.v)]
        for blocks in self.blocks:
            for block in blocks:
                whole = WholeRows(*(rows(x, block.queries) for x in (self.dout, out, lse)))
                parts = self.kernel.backward(self._tile(block), whole)
                for total, more, taken in zip(totals, parts, (block.queries, block.keys, block.keys), strict=True):
                    rows(total, taken).add_(more)
        return [x.to(self.q.dtype) for x in totals]

    def _tile(self, block: Block) -> TileInputs:
        k, v = (rows(x, block.keys) for x in (self.k, self.v))
        return TileInputs(rows(self.q, block.queries), k, v, SCALE, causal=block.kind is Kind.CAUSAL)

    def merge(self) -> None:
        """As many merges of as many rows as the forward makes."""
        out, lse = (x.to(accumulator(x.dtype), copy=True) for x in self.saved)
        for blocks in self.blocks:
            for block in blocks[1:]:
                part, its = rows(out, block.queries), rows(lse, block.queries)
                merge_(part, its, part.clone(), its.clone())


def rows(x: Tensor, taken: range) -> Tensor:
    """A view of some tokens of x [B, H, S, D]."""
    return x[:, :, taken.start : taken.stop]


def place(pieces: Sequence[range], taken: range) -> slice:
    """Where rows lie in the local tensor of a rank that has `pieces`."""
    first = 0
    for piece in pieces:
        if taken.start in piece:
            first += taken.start - piece.start
            return slice(first, first + len(taken))
        first += len(piece)
    raise ValueError(f"rows {taken} are not in {pieces}")
