"""What one rank of p launches, sends and reads back for one attention, forward and backward, on a device that is not
there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.executor.attend import attend, attend_backward
from ringopt.context_parallel.executor.operands import Attention, Operands, Saved
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.context_parallel.geometry.rows import count
from ringopt.context_parallel.geometry.sharded_pattern import ShardedPattern
from ringopt.context_parallel.plan.head_exchange import HeadExchange
from ringopt.context_parallel.plan.plan_of import plan_of
from ringopt.distributed.mesh import PretendedMesh, Transfer
from ringopt.expr.mask import Mask
from ringopt.expr.terms import affine, applied, axis, load, score
from ringopt.kernels.choose import WithOthers
from ringopt.kernels.cuda_efficient import CudaEfficient
from ringopt.kernels.cuda_flash import CudaFlash
from ringopt.tools.benchmarks.lab.fake_cuda import LaunchCounter, fake_cuda
from ringopt.tools.benchmarks.workers.memory import Alone

PATTERNS = {"window": "window(4096)"}  # of those masks that are patterns; causal of the others
MASKS = ("causal", "window", "sinks", "padding", "documents", "softcap", "alibi", "dropout")


@dataclass(frozen=True)
class Shape:
    """Of the attention of one rank of `ranks`."""

    mask: str = "causal"
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    tokens: int = 8192
    ranks: int = 8
    layout: str = "zigzag"
    strategy: str = "ring"


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


def mask_of(shape: Shape, tokens: int) -> tuple[Mask, list[Tensor]]:
    """The mask of the program beside its pattern, and what it reads."""
    name = shape.mask
    if name == "padding":
        return Mask(visible=load(0, [axis("b"), axis("k")], torch.bool)), [
            torch.ones(1, tokens, dtype=torch.bool, device="cuda")
        ]
    if name == "documents":
        one, other = (load(0, [axis("b"), axis(each)], torch.int64) for each in "qk")
        same = applied("eq", [one, other], torch.bool)
        return Mask(visible=same), [torch.ones(1, tokens, dtype=torch.int64, device="cuda")]
    if name == "softcap":
        capped = applied("tanh", [applied("mul", [score(torch.bfloat16), 0.02], torch.bfloat16)], torch.bfloat16)
        return Mask(score=applied("mul", [capped, 50.0], torch.bfloat16)), []
    if name == "alibi":
        slopes, apart = load(0, [axis("h")], torch.float32), affine({"k": 1, "q": -1}, 0)
        return Mask(bias=applied("mul", [slopes, apart], torch.float32)), [torch.ones(shape.heads, device="cuda")]
    return Mask(), []


def launched(shape: Shape, rank: int) -> list[dict[str, Any]]:
    """A row for the forward and one for the backward."""
    n = shape.tokens * shape.ranks
    sharded = ShardedPattern(PATTERNS.get(shape.mask, "causal"), n, n, shape.ranks, shape.layout, shape.layout)
    with fake_cuda():
        mask, sources = mask_of(shape, n)
        plan = plan_of(sharded, shape.strategy, (shape.heads, shape.kv_heads), mask)
        whole, trade = (plan.whole, plan) if isinstance(plan, HeadExchange) else (plan, None)
        kernel = WithOthers(CudaFlash(), CudaEfficient())
        dropped = 0.1 if shape.mask == "dropout" else 0.0
        site = Attention(whole, mask, kernel, shape.dim**-0.5, dropout_p=dropped, heads=trade)
        rows = count(layout_of(shape.layout, n, shape.ranks).ranges(rank))
        q, k, v, dout = (
            projected(rows, heads, shape.dim) for heads in (shape.heads, *[shape.kv_heads] * 2, shape.heads)
        )
        sinks = torch.zeros(1, shape.heads, device="cuda") if shape.mask == "sinks" else None
        seed = torch.zeros((), dtype=torch.int64, device="cuda") if dropped else None
        mesh, found = Counting(rank, shape.ranks), list[dict[str, Any]]()
        given = Operands(q, k, v, sources, sinks, seed)
        with LaunchCounter() as forward:
            out, lse = attend(site, mesh, given)
        found.append(counts("forward", forward, mesh))
        mesh = Counting(rank, shape.ranks)
        with LaunchCounter() as backward:
            attend_backward(site, mesh, dout, Saved(given, out, lse))
        found.append(counts("backward", backward, mesh))
    return found


def projected(rows: int, heads: int, dim: int) -> Tensor:
    """[1, H, S, D] as a projection leaves it: tokens first."""
    return torch.empty(1, rows, heads, dim, dtype=torch.bfloat16, device="cuda").transpose(1, 2)


def counts(way: str, watched: LaunchCounter, mesh: Counting) -> dict[str, Any]:
    """The columns of one way."""
    counted = {"attention": watched.attention, "others": watched.others, "reads": watched.reads}
    return {"way": way, **counted, "copies": watched.copies, "batches": mesh.posted, "bytes": mesh.bytes}
