"""Where the heads and rows of a term lie in a rank's tensors: views, so that nothing is copied that need not be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.dilation import DilatedTerm, Kept
from ringopt.context_parallel.plan.dilated import Piece, Stretch


def of_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    """[B, heads, ...]: a view, unless their numbers are unevenly spaced."""
    if isinstance(heads, range):
        return x[:, heads.start : heads.stop : heads.step]
    return x[:, list(heads)]


def views(x: Tensor, heads: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    """The heads as views to write to, each with its place among them."""
    if isinstance(heads, range):
        yield slice(None), of_heads(x, heads)
        return
    for place, head in enumerate(heads):
        yield slice(place, place + 1), x[:, head : head + 1]


def in_segments(x: Tensor, first: int, stretch: Stretch, kept: Kept) -> Tensor:
    """[B, H, S, ...] -> [B, H, segments, kept rows, ...]: a view of what a stretch keeps, beginning at row `first`."""
    rows: Tensor = x.narrow(2, first, stretch.rows).unflatten(2, (stretch.segments, stretch.length))
    return rows[:, :, :, kept.offset :: kept.rate]


def batched(x: Tensor) -> Tensor:
    """[B, H, segments, rows, ...] -> [B * segments, H, rows, ...], a view where B is 1: a segment is as good as a batch
    row."""
    return x.transpose(1, 2).flatten(0, 1)


def unbatched(x: Tensor, batch: int) -> Tensor:
    """The inverse of `batched`: a view."""
    segments: Tensor = x.unflatten(0, (batch, -1))
    return segments.transpose(1, 2)


def packed(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """[B, H, S_local, ...] -> [B, H, rows of the pieces, ...]: a view where there is one piece."""
    parts = [x[:, :, piece.here] for piece in pieces] or [x[:, :, :0]]
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0]


def packed_places(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, slice]]:
    """Each piece with its place in what `packed` returns."""
    start = 0
    for piece in pieces:
        yield piece, slice(start, start + len(piece.packed))
        start += len(piece.packed)


def expand_kv_heads(x: Tensor, term: DilatedTerm) -> Tensor:
    """KV heads as the kernels take them: one a query head where query heads share them unevenly."""
    return x if term.spread is None else x[:, list(term.spread)]


def collected(dx: Tensor, term: DilatedTerm) -> Tensor:
    """The gradient of `x` from that of `expand_kv_heads(x, term)`."""
    if term.spread is None:
        return dx
    place = torch.tensor(term.spread, device=dx.device)
    return dx.new_zeros(dx.shape[0], len(term.kv_heads), *dx.shape[2:]).index_add_(1, place, dx)
