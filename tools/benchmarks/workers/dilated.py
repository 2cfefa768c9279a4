"""One rank's part of `ringopt bench dilated`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import ringopt
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.tools.benchmarks.lab.result import Row
from ringopt.tools.benchmarks.workers.overlap_rank import begin_rank
from ringopt.tools.common.resident import reset_peak, resident

SAMPLED = 16
WARM = 8  # rows of a first call, which loads what all calls need


@dataclass(frozen=True)
class DilatedSizes:
    """One attention of `heads` heads of `dim`; `dense`: and SDPA of the same, beside it."""

    length: int
    heads: int
    dim: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    dense: bool


@torch.no_grad()
def on_a_rank(rank: int, ranks: int, case: DilatedSizes, repeats: int) -> Row:
    """Seconds of the median call, peak memory over the inputs, error, bytes sent; "dense": seconds of SDPA."""
    begin_rank()
    draw = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, case.heads, case.length, case.dim, generator=draw) for _ in range(3)]
    (own,) = layout_of("contiguous", case.length, ranks).ranges(rank)
    local = [x[:, :, own.start : own.stop].clone() for x in whole]

    def dilated(rows: int = case.length) -> Tensor:
        q, k, v = (x[:, :, :rows] for x in local)
        return ringopt.attention(q, k, v, segment_lengths=case.segments, dilation_rates=case.rates)

    dilated(WARM)
    before = reset_peak()
    with ringopt.record_traffic() as traffic:
        out = dilated()
    memory = (resident("VmHWM") - before) / sum(x.nbytes for x in local)
    sent = sum(event.bytes for event in traffic.events if event.kind == "posted")
    places = own.start + torch.randint(len(own), (SAMPLED,), generator=draw)
    error = max(apart(whole, out[:, :, int(t) - own.start], int(t), case.segments, case.rates) for t in places)
    del out
    found: Row = {"memory": memory, "sent": sent, "error": error, "seconds": seconds(dilated, repeats)}
    if case.dense:
        q, k, v = whole
        found["dense"] = seconds(lambda: F.scaled_dot_product_attention(q, k, v), repeats)
    return found


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The median time (seconds) of `repeats` calls that all ranks begin together."""
    found = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def apart(whole: Sequence[Tensor], out: Tensor, t: int, segments: Sequence[int], rates: Sequence[int]) -> float:
    """How far one row [1, H, D] is from its definition, by the largest entry."""
    q, k, v = (x[0] for x in (whole[0][:, :, t], whole[1], whole[2]))
    worst = 0.0
    for head in range(q.shape[0]):
        seen = [
            s
            for w, r in zip(segments, rates, strict=True)
            if t % w % r == head % r
            for s in range(t // w * w + head % r, min(t // w * w + w, k.shape[1]), r)
        ]
        weights = (k[head, seen].double() @ q[head].double() * q.shape[1] ** -0.5).softmax(0)
        right = weights @ v[head, seen].double()
        worst = max(worst, float((out[0, head].double() - right).abs().max() / right.abs().max()))
    return worst
