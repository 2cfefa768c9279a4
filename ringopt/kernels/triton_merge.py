"""Sums over tiles in one launch each, in Triton: partial softmaxes merged by their log-sum-exp, gradients added.

Sums are made in float32, whatever the parts come in or the result leaves in. Of a tensor [B, H, S, D] the last dim is
dense, the others lie as their strides say. Imported where Triton is at hand only (fused.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

Tensors = Sequence[Tensor]

ELEMENTS = 4096  # of a tensor, that one program has at once

HIDDEN = tl.constexpr(float("-inf"))


@triton.jit
def place(b, h, row, strides):
    """Where rows of a head begin."""
    return b * strides[0] + h * strides[1] + row.to(tl.int64) * strides[2]


@triton.jit
def weigh(x, at, lse, top, there, dims):
    """exp(lse - top) and the rows of `x` times that. Rows whose weight is 0 are not read: they may be anything."""
    weight = tl.exp(lse - top)
    seen = there & (lse != HIDDEN)
    rows = tl.load(x + at, mask=seen[:, None] & dims, other=0.0).to(tl.float32)
    return weight, weight[:, None] * rows


@triton.jit
def merge_kernel(
    out, lse, sums, parts, lses, strides, firsts, lengths, heads, rows,
    D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """`out` and `lse` become the softmax over all that `sums` (a pair, or nothing) and `parts` are softmaxes of; a row
    that none of them sees anything of becomes 0 and -inf. Part i is of the rows from firsts[i] on. `strides`: of out,
    lse, the sums and their lse, each part and its lse."""
    blocks = (rows + BM - 1) // BM
    pair = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = pair // heads, pair % heads
    row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
    column = tl.arange(0, BD)[None, :]
    here, dims = row < rows, column < D

    top = tl.full([BM], HIDDEN, tl.float32)
    if len(sums) > 0:
        top = tl.maximum(top, tl.load(sums[1] + place(b, h, row, strides[3]), mask=here, other=HIDDEN))
    for i in tl.static_range(len(parts)):
        own = row - firsts[i]
        there = (own >= 0) & (own < lengths[i])
        top = tl.maximum(top, tl.load(lses[i] + place(b, h, own, strides[5 + 2 * i]), mask=there, other=HIDDEN))
    top = tl.where(top == HIDDEN, 0.0, top)

    weights = tl.full([BM], 0.0, tl.float32)
    total = tl.full([BM, BD], 0.0, tl.float32)
    if len(sums) > 0:
        old = tl.load(sums[1] + place(b, h, row, strides[3]), mask=here, other=HIDDEN)
        weight, values = weigh(sums[0], place(b, h, row, strides[2])[:, None] + column, old, top, here, dims)
        weights += weight
        total += values
    for i in tl.static_range(len(parts)):
        own = row - firsts[i]
        there = (own >= 0) & (own < lengths[i])
        new = tl.load(lses[i] + place(b, h, own, strides[5 + 2 * i]), mask=there, other=HIDDEN)
        at = place(b, h, own, strides[4 + 2 * i])[:, None] + column
        weight, values = weigh(parts[i], at, new, top, there, dims)
        weights += weight
        total += values

    seen = weights != 0.0
    safe = tl.where(seen, weights, 1.0)
    found = (total / safe[:, None]).to(out.dtype.element_ty)
    # The sums may be `out` and `lse`. Threads that weigh a row have read its log-sum-exp by themselves, and another
    # thread writes the new one.
    tl.debug_barrier()
    tl.store(out + place(b, h, row, strides[0])[:, None] + column, found, mask=here[:, None] & dims)
    tl.store(lse + place(b, h, row, strides[1]), tl.where(seen, top + tl.log(safe), HIDDEN), mask=here)


@triton.jit
def add_kernel(totals, parts, strides, heads, rows, dims, pairs, BM: tl.constexpr, BD: tl.constexpr):
    """Each part is added to its total. One of the last axis of the grid a part, of which strides come in twos."""
    for i in tl.static_range(len(parts)):
        if tl.program_id(1) == i:
            blocks = (rows[i] + BM - 1) // BM
            pair = (tl.program_id(0) // blocks).to(tl.int64)
            if pair < pairs[i]:
                b, h = pair // heads[i], pair % heads[i]
                row = (tl.program_id(0) % blocks) * BM + tl.arange(0, BM)
                column = tl.arange(0, BD)[None, :]
                inside = (row < rows[i])[:, None] & (column < dims[i])
                into = totals[i] + place(b, h, row, strides[2 * i])[:, None] + column
                part = tl.load(parts[i] + place(b, h, row, strides[2 * i + 1])[:, None] + column, mask=inside)
                total = tl.load(into, mask=inside).to(tl.float32) + part.to(tl.float32)
                tl.store(into, total.to(totals[i].dtype.element_ty), mask=inside)


# ---- launched --------------------------------------------------------------------------------------------------------
def merge(out: Tensor, lse: Tensor, sums: Tensors, parts: Tensors, lses: Tensors, firsts: Sequence[int]) -> None:
    """See `merge_kernel`: [B, H, S, D] and [B, H, S], of parts fewer rows."""
    batch, heads, rows, dim = out.shape
    given = [out, lse, *(sums or (out, lse)), *(x for pair in zip(parts, lses, strict=True) for x in pair)]
    sizes = block_of(dim)
    merge_kernel[(triton.cdiv(rows, sizes["BM"]) * batch * heads,)](
        *(out, lse, tuple(sums), tuple(parts), tuple(lses)),
        *(tuple(map(steps, given)), tuple(firsts), tuple(part.shape[2] for part in parts), heads, rows),
        D=dim,
        **sizes,
    )


def add(totals: Tensors, parts: Tensors) -> None:
    """See `add_kernel`: [B, H, S, D] all, and a total as large as its part."""
    sizes = block_of(max(part.shape[3] for part in parts))
    blocks = [triton.cdiv(part.shape[2], sizes["BM"]) * part.shape[0] * part.shape[1] for part in parts]
    strides = tuple(steps(x) for pair in zip(totals, parts, strict=True) for x in pair)
    _, heads, rows, dims = zip(*(part.shape for part in parts), strict=True)
    pairs = tuple(part.shape[0] * part.shape[1] for part in parts)
    add_kernel[(max(blocks), len(parts))](tuple(totals), tuple(parts), strides, heads, rows, dims, pairs, **sizes)


def steps(x: Tensor) -> tuple[int, ...]:
    """From batch to batch, head to head, row to row."""
    return x.stride()[:3]


def block_of(dim: int) -> dict[str, Any]:
    """Rows and columns that a program has at once."""
    columns = triton.next_power_of_2(dim)
    return {"BM": max(1, min(64, ELEMENTS // columns)), "BD": columns}
