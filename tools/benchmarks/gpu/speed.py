"""How fast one rank of an attention is whose messages are copies on its own device, beside one call of SDPA that
computes as much; and the time it takes and the bytes it holds beside what is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.plan_of import exchange_of
from ringopt.cost.memory import memory_of
from ringopt.cost.simulate import Heads, pairs_of, simulate
from ringopt.distributed.mesh import PretendedMesh, Transfer
from ringopt.expr.mask import Mask
from ringopt.hardware import profile
from ringopt.kernels.choose import choose_kernel
from ringopt.tools.benchmarks.gpu.stream_mesh import Done
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes
from ringopt.tools.benchmarks.lab.timing import interleaved
from ringopt.tools.benchmarks.workers.memory import Alone

DIM, RANK, RANKS = 128, 3, 8
REPEATS = 5
NEAR = 0.15  # what is held may differ by so much from what was predicted
IN_TIME = 0.3  # and the time


class Loopback(Alone):
    """One rank, to which comes what it sends: copies on a stream of their own, in the place of a link."""

    def __init__(self, device: torch.device):
        super().__init__(PretendedMesh(RANK, RANKS))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        pairs = list(zip((x for _, x in sends), (x for _, x in receives), strict=False))
        for _, buffer in receives[len(pairs) :]:
            buffer.zero_()
        if self._stream is None:
            for sent, got in pairs:
                filled(sent, got)
            return [Transfer(label, Done())]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for sent, got in pairs:
                filled(sent, got)
            done = self._stream.record_event()
        return [Transfer(label, Behind(done))]


class Behind:
    """Of copies that end with an event."""

    def __init__(self, event: Any):
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


def filled(sent: Tensor, got: Tensor) -> None:
    """As much of `got` as there is to send; the rest is 0."""
    size = min(sent.numel(), got.numel())
    got.view(-1)[:size].copy_(sent.view(-1)[:size])
    got.view(-1)[size:].zero_()


class Rank:
    """Rank 3 of 8, causal, by the ring."""

    def __init__(self, device: torch.device, tokens: int, heads: int, kv_heads: int, dtype: torch.dtype):
        n = tokens * RANKS
        self.plan = exchange_of(ShardedPattern("causal", n, n, RANKS, "zigzag", "zigzag"), "ring")
        made = [torch.randn(1, tokens, each, DIM, device=device, dtype=dtype).transpose(1, 2) for each in (
            heads, kv_heads, kv_heads, heads
        )]  # fmt: skip
        q, k, v, self.dout = made
        self.given = Operands(q, k, v)
        kernel, self.reason = choose_kernel("auto", dtype, device, DIM, DIM)
        self.site = Attention(self.plan, Mask(), kernel, DIM**-0.5)
        self.mesh, self.device = Loopback(device), device
        self.heads = Heads.of(q, k, v, kernel.name)

    def run(self) -> list[Tensor]:
        """Forward and backward."""
        with torch.no_grad():
            out, lse = attend(self.site, self.mesh, self.given)
            return [*attend_backward(self.site, self.mesh, self.dout, Saved(self.given, out, lse))[:3]]

    @property
    def equal(self) -> int:
        """Tokens of a causal attention that has as many pairs."""
        return round(math.sqrt(2 * pairs_of(self.plan, RANK)))


def alone(rank: Rank, backend: SDPBackend | None) -> Callable[[], object]:
    """SDPA, forward and backward, of as many pairs."""
    q, k, v = (
        torch.randn(1, rank.equal, x.shape[1], DIM, device=rank.device, dtype=x.dtype).transpose(1, 2).requires_grad_()
        for x in (rank.given.q, rank.given.k, rank.given.v)
    )
    dout = torch.randn_like(q)

    def run() -> object:
        with sdpa_kernel(backend) if backend is not None else torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            return torch.autograd.grad(out, (q, k, v), dout)

    return run


def waited(device: torch.device, run: Callable[[], object]) -> Callable[[], object]:
    """`run`, until the device is done."""

    def call() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return call


def speed(device: torch.device, lengths: Sequence[int], heads: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Of the time of one call of SDPA; 100% is as fast."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for tokens in lengths:
        for some in heads:
            rank = Rank(device, tokens, *some, dtype)
            others = {"SDPA": alone(rank, None)}
            if device.type == "cuda":
                others["FlashAttention-2"] = alone(rank, SDPBackend.FLASH_ATTENTION)
            runs = {name: waited(device, run) for name, run in {"ring": rank.run, **others}.items()}
            for run in runs.values():
                run()
            seconds = interleaved(runs, REPEATS)
            for name in others:
                share = seconds[name] / seconds["ring"]
                figure = f"{seconds['ring'] * 1e3:.1f} ms, {share:.0%} of {name}"
                what = f"{tokens} tokens a rank, heads {some[0]}/{some[1]}, {name}"
                found = ("reached" if share >= 0.95 else "short") if device.type == "cuda" else "not judged"
                row = {"part": "speed", "what": what, "verdict": found, "error": None, "figure": figure, "why": ""}
                yield row
            yield foretold(rank, tokens, some, seconds["ring"])
            yield held(rank, tokens, some)


def foretold(rank: Rank, tokens: int, heads: tuple[int, int], seconds: float) -> Row:
    """The time of the ring, beside that by which strategies are chosen: of a measured profile, or of a data sheet."""
    rates = profile.here(rank.device.type)
    expected = sum(simulate(rank.plan, rank.heads, rates, backward).seconds for backward in (False, True))
    ratio = seconds / expected
    near = "as predicted" if abs(ratio - 1) <= IN_TIME else "less" if ratio < 1 else "more"
    return {
        "part": "prediction",
        "what": f"{tokens} tokens a rank, heads {heads[0]}/{heads[1]}",
        "verdict": near if rank.device.type == "cuda" else "not judged",
        "error": None,
        "figure": f"{seconds * 1e3:.1f} ms, {ratio:.0%} of the prediction ({rates.source})",
        "why": "",
    }


def held(rank: Rank, tokens: int, heads: tuple[int, int]) -> Row:
    """Bytes at the peak of a forward and backward, beside the prediction."""
    memory = memory_of(rank.plan, rank.heads, RANK)
    if rank.device.type == "cuda":
        torch.cuda.synchronize(rank.device)
        before = torch.cuda.memory_allocated(rank.device)
        torch.cuda.reset_peak_memory_stats(rank.device)
        rank.run()
        torch.cuda.synchronize(rank.device)
        peak = torch.cuda.max_memory_allocated(rank.device) - before
    else:
        peak = peak_bytes(rank.run)
    ratio = peak / memory.training
    return {
        "part": "memory",
        "what": f"{tokens} tokens a rank, heads {heads[0]}/{heads[1]}",
        "verdict": "as predicted" if abs(ratio - 1) <= NEAR else "less" if ratio < 1 else "more",
        "error": None,
        "figure": f"{peak / 2**20:,.1f} MiB, {ratio:.0%} of the prediction",
        "why": "",
    }
