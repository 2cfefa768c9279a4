"""What one rank of p launches, sends and reads back for the attention of some layers, forward and backward, on a
device that is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.distributed.mesh import PretendedMesh, Transfer
from ringopt.expr.mask import Mask
from ringopt.expr.terms import affine, applied, axis, load, score
from ringopt.hardware import devices
from ringopt.kernels.base import Kernel
from ringopt.kernels.choose import WithOthers
from ringopt.kernels.cpu_flash import CpuFlash
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash
from ringopt.tools.benchmarks.lab.fake_cuda import LaunchCounter, fake_cuda
from ringopt.tools.benchmarks.workers.memory import Alone

MASKS = ("causal", "window", "sinks", "padding", "documents", "softcap", "alibi", "dropout")


@dataclass(frozen=True)
class Shape:
    """Of the attentions of one rank of `ranks`, in so many layers that share a mask."""

    mask: str = "causal"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    tokens: int = 8192
    ranks: int = 8
    layout: str = "zigzag"
    strategy: str = "ring"
    layers: int = 1


class Counting(Alone):
    """Counts what it posts: batches of messages, and their bytes."""

    def __init__(self, rank: int, size: int):
        super().__init__(PretendedMesh(rank, size))
        self.posted, self.bytes = 0, 0

    def _post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], label: str
    ) -> list[Transfer]:
        self.posted += 1
        self.bytes += sum(buffer.nbytes for _, buffer in sends)
        return []


def mask_of(shape: Shape, tokens: int, device: str) -> tuple[Mask, list[Tensor]]:
    """The mask of the program beside its pattern, and what it reads."""
    name = shape.mask
    if name == "padding":
        there = torch.ones(1, tokens, dtype=torch.bool, device=device)
        return Mask(visible=load(0, [axis("b"), axis("k")], torch.bool)), [there]
    if name == "documents":
        one, other = (load(0, [axis("b"), axis(each)], torch.int64) for each in "qk")
        same = applied("eq", [one, other], torch.bool)
        return Mask(visible=same), [torch.ones(1, tokens, dtype=torch.int64, device=device)]
    if name == "softcap":
        capped = applied("tanh", [applied("mul", [score(torch.bfloat16), 0.02], torch.bfloat16)], torch.bfloat16)
        return Mask(score=applied("mul", [capped, 50.0], torch.bfloat16)), []
    if name == "alibi":
        slopes, apart = load(0, [axis("h")], torch.float32), affine({"k": 1, "q": -1}, 0)
        return Mask(bias=applied("mul", [slopes, apart], torch.float32)), [torch.ones(shape.heads, device=device)]
    return Mask(), []


@dataclass(frozen=True)
class Layer:
    """An attention as a rank is given it, on a device."""

    site: Attention
    given: Operands
    dout: Tensor

    @classmethod
    def of(cls, shape: Shape, rank: int, device: str, kernel: Kernel) -> Layer:
        n = shape.tokens * shape.ranks
        pattern = f"window({max(1, shape.tokens // 2)})" if shape.mask == "window" else "causal"
        sharded = ShardedPattern(pattern, n, n, shape.ranks, shape.layout, shape.layout)
        mask, sources = mask_of(shape, n, device)
        plan = plan_of(sharded, shape.strategy, (shape.heads, shape.kv_heads), mask)
        whole, trade = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
        dropped = 0.1 if shape.mask == "dropout" else 0.0
        rows = count(layout_of(shape.layout, n, shape.ranks).ranges(rank))
        q, k, v, dout = (
            projected(rows, heads, shape.dim, device) for heads in (shape.heads, *[shape.kv_heads] * 2, shape.heads)
        )
        sinks = torch.zeros(1, shape.heads, device=device) if shape.mask == "sinks" else None
        seed = torch.zeros((), dtype=torch.int64, device=device) if dropped else None
        site = Attention(whole, mask, kernel, shape.dim**-0.5, dropout_p=dropped, heads=trade)
        return cls(site, Operands(q, k, v, sources, sinks, seed), dout)

    def forward(self, mesh: Counting, layers: int) -> Saved:
        """As a graph runs them: what their mask reads is brought to the host for all of them."""
        given = replace(self.given, facts=MaskFacts(self.given.sources))
        for _layer in range(layers):
            out, lse = attend(self.site, mesh, given)
        return Saved(given, out, lse)

    def backward(self, mesh: Counting, saved: Saved, layers: int) -> None:
        for _layer in range(layers):
            attend_backward(self.site, mesh, self.dout, saved)


def launched(shape: Shape, rank: int) -> list[dict[str, Any]]:
    """A row for the forward and one for the backward."""
    with fake_cuda():
        layer = Layer.of(shape, rank, "cuda", WithOthers(CudaFlash(), CudaEfficient()))
        sent, sent_back = Counting(rank, shape.ranks), Counting(rank, shape.ranks)
        with LaunchCounter() as forward:
            saved = layer.forward(sent, shape.layers)
        with LaunchCounter() as backward:
            layer.backward(sent_back, saved, shape.layers)
    return [counts("forward", forward, sent), counts("backward", backward, sent_back)]


# Rows of a rank, and numbers of a head, so small that a CPU takes no time for them.
TINY, NARROW, TRIES = 32, 8, 5


def on_the_host(shape: Shape, rank: int) -> tuple[float, float]:
    """Seconds of a layer, forward and backward, of Python and the dispatch of operators, each on next to nothing: what
    a host takes that only launches. Work is cut as for a GPU; a little more is launched, for want of Triton."""
    tiny, found, threads = replace(shape, tokens=TINY, dim=NARROW), list[tuple[float, float]](), torch.get_num_threads()
    torch.set_num_threads(1)
    with patch.object(devices, "OF_CORES", devices.OF_GPUS):
        layer, mesh = Layer.of(tiny, rank, "cpu", CpuFlash()), Counting(rank, shape.ranks)
        for _try in range(TRIES):
            began = perf_counter()
            saved = layer.forward(mesh, 1)
            between = perf_counter()
            layer.backward(mesh, saved, 1)
            found.append((between - began, perf_counter() - between))
    torch.set_num_threads(threads)
    forward, backward = (min(way) for way in zip(*found, strict=True))
    return forward, backward


def projected(rows: int, heads: int, dim: int, device: str) -> Tensor:
    """[1, H, S, D] as a projection leaves it: tokens first."""
    return torch.zeros(1, rows, heads, dim, dtype=torch.bfloat16, device=device).transpose(1, 2)


def counts(way: str, watched: LaunchCounter, mesh: Counting) -> dict[str, Any]:
    """The columns of one way."""
    counted = {"attention": watched.attention, "others": watched.others, "reads": watched.reads}
    return {"way": way, **counted, "copies": watched.copies, "batches": mesh.posted, "bytes": mesh.bytes}
