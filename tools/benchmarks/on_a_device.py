"""Kernels on one device, beside SDPA: seconds and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.attention.exchange import Block, Exchange, exchange_of
from ringopt.attention.merge import Merged, merge_
from ringopt.attention.patterns import Kind
from ringopt.kernels.base import Kernel, accumulator
from ringopt.kernels.choose import KERNELS, choose
from ringopt.tools.benchmarks.kernels import RING
from ringopt.tools.benchmarks.numbers import distance
from ringopt.tools.benchmarks.result import Row
from ringopt.tools.benchmarks.timing import interleaved

DIM = 64
SCALE = DIM**-0.5
EXACT = 4096  # tokens up to which the reference is computed in float64
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
Run = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Case:
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


def rows_of(case: Case, names: Sequence[str], repeats: int, refusals: dict[str, str]) -> list[Row]:
    """A row for each kernel of `names` that can do it; `refusals` is told of the others."""
    q, k, v, dout = case.operands()
    kernels = {}
    for kernel in KERNELS:
        if kernel.name in names:
            refusal = kernel.supports(q.dtype, q.device, DIM, DIM)
            if refusal is None:
                kernels[kernel.name] = kernel
            else:
                refusals[kernel.name] = refusal.sentence
    forward: dict[str, Run] = {"sdpa": lambda: [sdpa(case, q, k, v)]}
    backward: dict[str, Run] = {"sdpa": backward_of_sdpa(case, q, k, v, dout)}
    saved = {}
    for name, kernel in kernels.items():
        saved[name] = kernel.forward(q, k, v, None, case.causal, SCALE)
        forward[name] = lambda kernel=kernel: list(kernel.forward(q, k, v, None, case.causal, SCALE)[:1])  # type: ignore[misc]
        backward[name] = lambda kernel=kernel, kept=saved[name]: list(  # type: ignore[misc]
            kernel.backward(dout, q, k, v, kept[0].to(q.dtype), kept[1], None, case.causal, SCALE)
        )
    merging = None
    if RING in names:
        ring = VirtualRing(case, choose("auto", q.dtype, q.device, DIM, DIM)[0], (q, k, v, dout))
        forward[RING], backward[RING] = ring.forward, ring.backward
        merging = interleaved({"merge": synchronized(case, ring.merge)}, repeats)["merge"]
    expected = reference(case, q, k, v, dout)
    errors = {name: distance([*forward[name](), *backward[name]()], expected) for name in forward if name != "sdpa"}
    seconds = [
        interleaved({name: synchronized(case, run) for name, run in runs.items()}, repeats)
        for runs in (forward, backward)
    ]
    return [
        {
            **asdict(case),
            "heads": "{}/{}".format(*case.heads),
            "kernel": f"ring of {case.ranks}" if name == RING else name,
            "forward_seconds": seconds[0][name],
            "forward_ratio": seconds[0][name] / seconds[0]["sdpa"],
            "backward_seconds": seconds[1][name],
            "backward_ratio": seconds[1][name] / seconds[1]["sdpa"],
            "merge_seconds": merging if name == RING else None,
            "error": errors[name],
        }
        for name in errors
    ]


def sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1]
    )


def backward_of_sdpa(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Run:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = sdpa(case, *leaves)
    return lambda: list(torch.autograd.grad(out, leaves, dout, retain_graph=True))


def reference(case: Case, *given: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    q, k, v, dout = given if case.length > EXACT else [x.double() for x in given]
    found = [sdpa(case, q, k, v), *backward_of_sdpa(case, q, k, v, dout)()]
    return [x.to(given[0].dtype) for x in found]


def synchronized(case: Case, run: Callable[[], object]) -> Callable[[], object]:
    if case.device != "cuda":
        return run

    def call() -> None:
        run()
        torch.cuda.synchronize()

    return call


class VirtualRing:
    """The blocks of a ring's ranks, one rank after the other, with all rows at hand."""

    def __init__(self, case: Case, kernel: Kernel, given: Sequence[Tensor]):
        layout = "zigzag" if case.causal else "contiguous"
        self.plan: Exchange = exchange_of(case.pattern, case.length, case.length, case.ranks, layout, layout, "ring")
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
                found = self.kernel.forward(
                    rows(self.q, block.queries), rows(self.k, block.keys), rows(self.v, block.keys), *how(block)
                )
                merged.add(place(pieces, block.queries), *found)
            for whole, part in zip((out, lse), merged.result(), strict=True):
                for piece in pieces:
                    rows(whole, piece).copy_(part[:, :, place(pieces, piece)])
        return out, lse

    def backward(self) -> list[Tensor]:
        out, lse = self.saved
        totals = [torch.zeros_like(x, dtype=accumulator(x.dtype)) for x in (self.q, self.k, self.v)]
        for blocks in self.blocks:
            for block in blocks:
                dout, q, part, logits = (rows(x, block.queries) for x in (self.dout, self.q, out, lse))
                k, v = (rows(x, block.keys) for x in (self.k, self.v))
                parts = self.kernel.backward(dout, q, k, v, part, logits, *how(block))
                for total, more, taken in zip(totals, parts, (block.queries, block.keys, block.keys), strict=True):
                    rows(total, taken).add_(more)
        return [x.to(self.q.dtype) for x in totals]

    def merge(self) -> None:
        """As many merges of as many rows as the forward makes."""
        out, lse = (x.to(accumulator(x.dtype), copy=True) for x in self.saved)
        for blocks in self.blocks:
            for block in blocks[1:]:
                part = rows(out, block.queries), rows(lse, block.queries)
                merge_(*part, *(x.clone() for x in part))


def rows(x: Tensor, taken: range) -> Tensor:
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


def how(block: Block) -> tuple[None, bool, float]:
    return None, block.kind is Kind.CAUSAL, SCALE
