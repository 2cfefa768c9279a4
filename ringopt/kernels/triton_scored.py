"""Attention in Triton whose scores are changed, hidden and dropped where they are made (FlashAttention-2, Dao 2023,
with the backward of a block by the log-sum-exp of the whole row). Nothing of the size of the scores is in memory.

Weights are dropped by the hash of context_parallel/executor/dropout.py, so the same ones as on any device. Sums are
made in float32. Imported where Triton is at hand only (scored.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringopt.kernels.score_program import function_of

HIDDEN = tl.constexpr(float("-inf"))
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
ROWS, KEYS = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0x5851F42D4C957F2D)


# ---- dropped weights -------------------------------------------------------------------------------------------------
@triton.jit
def scrambled(x):
    """Of SplitMix64: good in the upper bits."""
    x = (x ^ (x >> 30)) * FIRST
    return (x ^ (x >> 27)) * SECOND


@triton.jit
def mixed(x):
    """A bijection of the 64-bit numbers, good in all bits."""
    x = scrambled(x)
    return x ^ (x >> 31)


@triton.jit
def factor(seed, b, h, q, k, least, keep):
    """[queries, keys]: what weights are multiplied with."""
    start = tl.load(seed).to(tl.uint64)
    rows = mixed(mixed(start + ROWS) ^ b.to(tl.uint64))
    rows = mixed(mixed(rows ^ h.to(tl.uint64)) ^ q.to(tl.uint64))
    keys = mixed(mixed(start + KEYS) ^ k.to(tl.uint64))
    return tl.where(scrambled(rows ^ keys).to(tl.int64) >= least, keep, 0.0)


# ---- scores ----------------------------------------------------------------------------------------------------------
@triton.jit
def rows_of(x, b, h, row, column, strides, rows, columns):
    """[rows, columns] of one head, zeros beyond its ends."""
    there = (row < rows)[:, None] & (column < columns)[None, :]
    base = x + b * strides[0] + h * strides[1]
    return tl.load(base + row.to(tl.int64)[:, None] * strides[2] + column[None, :], mask=there, other=0.0)


@triton.jit
def changed(s, b, h, row, column, mask, given, SCORES: tl.constexpr, MASKED: tl.constexpr, BANDED: tl.constexpr):
    """The scores as the mask leaves them, -inf where hidden, and their slope in the scores."""
    queries, keys, place, band, strides, loads, steps, sizes = given
    seen = (row < queries)[:, None] & (column < keys)[None, :]
    slope = tl.full(s.shape, 1.0, tl.float32)
    if SCORES is not None:
        q, k = place[0] + row.to(tl.int64) * place[1], place[2] + column.to(tl.int64) * place[3]
        r = place[4] + row.to(tl.int64) * place[5]
        s, d, own = SCORES(s, b, h + place[6], q[:, None], k[None, :], r[:, None], loads, steps, sizes)
        seen, slope = seen & own, slope * d
    if MASKED:
        at = mask + b * strides[0] + h * strides[1]
        at += row.to(tl.int64)[:, None] * strides[2] + column.to(tl.int64)[None, :] * strides[3]
        added = tl.load(at, mask=(row < queries)[:, None] & (column < keys)[None, :], other=HIDDEN).to(tl.float32)
        s = tl.where(added == HIDDEN, HIDDEN, s + added)
    if BANDED:
        apart = column[None, :] - row[:, None]
        seen = seen & (apart >= band[0]) & (apart < band[1])
    s = tl.where(seen, s, HIDDEN)
    return s, tl.where(s == HIDDEN, 0.0, slope)


@triton.jit
def dropped(seed, b, h, row, column, given, drop):
    """`factor` of a block."""
    place = given[2]
    q, k = place[0] + row.to(tl.int64) * place[1], place[2] + column.to(tl.int64) * place[3]
    return factor(seed, b, h + place[6], q[:, None], k[None, :], drop[0], drop[1])


@triton.jit
def spot(rows, heads, B: tl.constexpr):
    """The first row of this program, its batch and its head; programs of one head follow each other."""
    blocks = (rows + B - 1) // B
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    return (tl.program_id(0) % blocks) * B, pair // heads, pair % heads


@triton.jit
def forward_kernel(
    q, k, v, out, lse, mask, seed, strides, given, drop, scale, heads, groups, dims,
    SCORES: tl.constexpr, MASKED: tl.constexpr, BANDED: tl.constexpr, DROPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`strides`: of q, k, v, out. `given`: see `changed`; `drop`: the least number that is kept, what it counts."""
    queries, keys, band = given[0], given[1], given[3]
    begin, b, h = spot(queries, heads, BM)
    row, wide, own = begin + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    some = rows_of(q, b, h, row, wide, strides[0], queries, dims[0])
    top, total = tl.full([BM], HIDDEN, tl.float32), tl.full([BM], 0.0, tl.float32)
    sums = tl.full([BM, BV], 0.0, tl.float32)
    first, last = 0, keys
    if BANDED:
        first = tl.maximum(0, begin + band[0]) // BN * BN
        last = tl.minimum(keys, begin + BM - 1 + band[1])
    for start in range(first, last, BN):
        column = start + tl.arange(0, BN)
        others = rows_of(k, b, h // groups, column, wide, strides[1], keys, dims[0])
        values = rows_of(v, b, h // groups, column, own, strides[2], keys, dims[1])
        s = tl.dot(some, tl.trans(others), input_precision="ieee") * scale
        s, _ = changed(s, b, h, row, column, mask, given, SCORES, MASKED, BANDED)
        now = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(now == HIDDEN, 0.0, now)
        weights, less = tl.exp(s - safe[:, None]), tl.exp(top - safe)
        total = total * less + tl.sum(weights, 1)
        if DROPS:
            weights *= dropped(seed, b, h, row, column, given, drop)
        sums = sums * less[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = now
    seen = total != 0.0
    full = tl.where(seen, total, 1.0)
    there = row < queries
    base = out + b * strides[3][0] + h * strides[3][1]
    at = base + row.to(tl.int64)[:, None] * strides[3][2] + own[None, :]
    tl.store(at, (sums / full[:, None]).to(out.dtype.element_ty), mask=there[:, None] & (own < dims[1])[None, :])
    tl.store(lse + (b * heads + h) * queries + row, tl.where(seen, top + tl.log(full), HIDDEN), mask=there)


@triton.jit
def weights_of(some, others, b, h, row, column, mask, logs, given, scale, SCORES, MASKED, BANDED):
    """Of a block by the log-sum-exp of its rows, and the slope of the changed score in the product."""
    s = tl.dot(some, tl.trans(others), input_precision="ieee") * scale
    s, slope = changed(s, b, h, row, column, mask, given, SCORES, MASKED, BANDED)
    return tl.exp(s - logs[:, None]), slope * scale


@triton.jit
def queries_kernel(
    q, k, v, dout, out, lse, dq, delta, dmask, mask, seed, strides, given, drop, scale, heads, groups, dims,
    SCORES: tl.constexpr, MASKED: tl.constexpr, BANDED: tl.constexpr, DROPS: tl.constexpr, LEARNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dq, the sum of dout * out of each row in `delta`, and what is asked of the mask in `dmask`. `strides`: of q, k,
    v, dout, out, lse."""
    queries, keys, band = given[0], given[1], given[3]
    begin, b, h = spot(queries, heads, BM)
    row, wide, own = begin + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    there = row < queries
    some = rows_of(q, b, h, row, wide, strides[0], queries, dims[0])
    grad = rows_of(dout, b, h, row, own, strides[3], queries, dims[1])
    result = rows_of(out, b, h, row, own, strides[4], queries, dims[1])
    logs = tl.load(lse + b * strides[5][0] + h * strides[5][1] + row * strides[5][2], mask=there, other=0.0)
    dot = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(delta + (b * heads + h) * queries + row, dot, mask=there)
    sums = tl.full([BM, BD], 0.0, tl.float32)
    first, last = 0, keys
    if BANDED:
        first = tl.maximum(0, begin + band[0]) // BN * BN
        last = tl.minimum(keys, begin + BM - 1 + band[1])
    for start in range(first, last, BN):
        column = start + tl.arange(0, BN)
        others = rows_of(k, b, h // groups, column, wide, strides[1], keys, dims[0])
        values = rows_of(v, b, h // groups, column, own, strides[2], keys, dims[1])
        weights, slope = weights_of(
            some, others, b, h, row, column, mask, logs, given, scale, SCORES, MASKED, BANDED
        )  # fmt: skip
        dweights = tl.dot(grad, tl.trans(values), input_precision="ieee")
        if DROPS:
            dweights *= dropped(seed, b, h, row, column, given, drop)
        dadded = weights * (dweights - dot[:, None])
        if LEARNS:
            at = dmask + ((b * heads + h) * queries + row)[:, None] * keys + column[None, :]
            tl.store(at, dadded, mask=there[:, None] & (column < keys)[None, :])
        sums += tl.dot((dadded * slope).to(others.dtype), others, input_precision="ieee")
    at = dq + ((b * heads + h) * queries + row)[:, None] * dims[0] + wide[None, :]
    tl.store(at, sums, mask=there[:, None] & (wide < dims[0])[None, :])


@triton.jit
def keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, mask, seed, strides, given, drop, scale, heads, groups, dims,
    SCORES: tl.constexpr, MASKED: tl.constexpr, BANDED: tl.constexpr, DROPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dk and dv, over all query heads of a KV head. `strides`: as in `queries_kernel`."""
    queries, keys, band, kv_heads = given[0], given[1], given[3], heads // groups
    begin, b, g = spot(keys, kv_heads, BN)
    column, wide, own = begin + tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    others = rows_of(k, b, g, column, wide, strides[1], keys, dims[0])
    values = rows_of(v, b, g, column, own, strides[2], keys, dims[1])
    dkeys, dvalues = tl.full([BN, BD], 0.0, tl.float32), tl.full([BN, BV], 0.0, tl.float32)
    first, last = 0, queries
    if BANDED:
        first = tl.maximum(0, begin - band[1] + 1) // BM * BM
        last = tl.minimum(queries, begin + BN - band[0])
    for one in range(0, groups):
        h = g * groups + one
        for start in range(first, last, BM):
            row = start + tl.arange(0, BM)
            there = row < queries
            some = rows_of(q, b, h, row, wide, strides[0], queries, dims[0])
            grad = rows_of(dout, b, h, row, own, strides[3], queries, dims[1])
            logs = tl.load(lse + b * strides[5][0] + h * strides[5][1] + row * strides[5][2], mask=there, other=0.0)
            dot = tl.load(delta + (b * heads + h) * queries + row, mask=there, other=0.0)
            weights, slope = weights_of(
                some, others, b, h, row, column, mask, logs, given, scale, SCORES, MASKED, BANDED
            )  # fmt: skip
            dweights = tl.dot(grad, tl.trans(values), input_precision="ieee")
            kept = weights
            if DROPS:
                times = dropped(seed, b, h, row, column, given, drop)
                kept, dweights = weights * times, dweights * times
            dvalues += tl.dot(tl.trans(kept).to(grad.dtype), grad, input_precision="ieee")
            dscores = weights * (dweights - dot[:, None]) * slope
            dkeys += tl.dot(tl.trans(dscores).to(some.dtype), some, input_precision="ieee")
    there = (column < keys)[:, None]
    line = ((b * kv_heads + g) * keys + column)[:, None]
    tl.store(dk + line * dims[0] + wide[None, :], dkeys, mask=there & (wide < dims[0])[None, :])
    tl.store(dv + line * dims[1] + own[None, :], dvalues, mask=there & (own < dims[1])[None, :])


# ---- launched --------------------------------------------------------------------------------------------------------
def common(q: Tensor, k: Tensor, v: Tensor, call: Sequence[Any]) -> Any:
    """The arguments that all kernels share: (mask, seed), (given, drop, scale, heads, groups, dims), constants."""
    mask, sources, seed, program, place, band, scale, least, keep = call
    queries, keys, heads = q.shape[2], k.shape[2], q.shape[1]
    strides = mask.expand(q.shape[0], heads, queries, keys).stride() if mask is not None else (0, 0, 0, 0)
    sizes = tuple(tuple(x.shape) for x in sources)
    given = (queries, keys, tuple(place), tuple(band) or (0, 0), strides, tuple(sources), *(steps(sources), sizes))
    rest = (given, (least, keep), scale, heads, heads // k.shape[1], (q.shape[3], v.shape[3]))
    widest = max(q.shape[3], v.shape[3]) * q.element_size()
    block = 64 if widest <= 256 else 32 if widest <= 512 else 16  # about 140 KiB of shared memory at most
    constants = {
        "SCORES": function_of(program, "scores") if program else None,
        **{"MASKED": mask is not None, "BANDED": bool(band), "DROPS": seed is not None, "BM": block, "BN": block},
        **{name: max(16, triton.next_power_of_2(x.shape[3])) for name, x in (("BD", q), ("BV", v))},
    }
    return (mask, seed), rest, constants


def steps(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    """The strides of each."""
    return tuple(tuple(x.stride()) for x in tensors)


def forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, Dv] in q's dtype, lse [B, Hq, Sq]. The last dims of q, k, v are dense."""
    (batch, heads, queries, _), dim = q.shape, v.shape[3]
    out = q.new_empty(batch, heads, queries, dim)
    lse = q.new_empty(batch, heads, queries, dtype=torch.float32)
    extras, rest, constants = common(q, k, v, call)
    grid = (triton.cdiv(queries, constants["BM"]) * batch * heads,)
    forward_kernel[grid](q, k, v, out, lse, *extras, steps((q, k, v, out)), *rest, **constants)
    return out, lse


def backward(
    grads: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor, *call: Any, learns: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32, and what is asked of the mask, [B, Hq, Sq, Sk], empty unless it `learns`. `grads`: dout,
    out, lse of the whole rows, -inf nowhere."""
    dout, out, lse = grads
    (batch, heads, queries, _), (kv_heads, keys) = q.shape, k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    shape = (batch, heads, queries, keys) if learns else (0,)
    dmask = torch.zeros(shape, dtype=torch.float32, device=q.device)  # blocks beyond a triangle are not visited
    extras, rest, constants = common(q, k, v, call)
    lies = steps((q, k, v, dout, out, lse))
    grid = (triton.cdiv(queries, constants["BM"]) * batch * heads,)
    queries_kernel[grid](q, k, v, dout, out, lse, dq, delta, dmask, *extras, lies, *rest, **constants, LEARNS=learns)
    grid = (triton.cdiv(keys, constants["BN"]) * batch * kv_heads,)
    keys_kernel[grid](q, k, v, dout, lse, delta, dk, dv, *extras, lies, *rest, **constants, num_warps=8)
    return dq, dk, dv, dmask
