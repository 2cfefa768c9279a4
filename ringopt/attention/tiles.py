"""From a block of the plan to tiles that a kernel computes: what is hidden is left out, masks are made a piece at a
time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringopt.attention.exchange import Block
from ringopt.attention.patterns import Kind, Pattern
from ringopt.attention.rows import meet
from ringopt.graph.mask import Mask
from ringopt.graph.terms import axes_of
from ringopt.kernels.base import HIDDEN

# Elements of one mask: 16 MiB in float32. A tile with a mask is cut over its queries to stay below, so that memory does
# not grow with the square of the rows of a rank.
MASK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Tile:
    """Queries x keys (global rows). `mask` is additive, [1|B, 1|Hq, queries, keys], or None."""

    queries: range
    keys: range
    mask: Tensor | None = None
    causal: bool = False

    def strips(self, rows: int) -> Iterator[Tile]:
        """The same in pieces of at most `rows` queries; a triangle becomes small triangles and what is before them."""
        if len(self.queries) <= rows:
            yield self
            return
        for start in range(self.queries.start, self.queries.stop, rows):
            queries = range(start, min(start + rows, self.queries.stop))
            if not self.causal:
                yield Tile(queries, self.keys, self._mask_of(queries, self.keys))
                continue
            before = range(self.keys.start, start)
            if before:
                yield Tile(queries, before, self._mask_of(queries, before))
            yield Tile(queries, queries, self._mask_of(queries, queries), causal=True)

    def _mask_of(self, queries: range, keys: range) -> Tensor | None:
        if self.mask is None:
            return None
        first, left = queries.start - self.queries.start, keys.start - self.keys.start
        return self.mask[:, :, first : first + len(queries), left : left + len(keys)]


@dataclass(frozen=True)
class Scores:
    """What is added to the scores of `batch` x `heads` attentions: the pattern's -inf, and a mask over `sources`."""

    pattern: Pattern
    mask: Mask
    sources: Sequence[Tensor]
    batch: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    _axes: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_axes", frozenset(axes_of([self.mask.visible, self.mask.bias])))

    def tiles(self, block: Block) -> Iterator[Tile]:
        """The tiles of a block, one at a time. Masks are differentiable in the sources where grad is enabled."""
        verdict = self._verdict(block.queries, block.keys)
        if verdict == "empty":
            return
        if verdict == "full" and block.kind is not Kind.PARTIAL:
            yield Tile(block.queries, block.keys, causal=block.kind is Kind.CAUSAL)
            return
        step = self._queries_at_once(len(block.keys))
        if verdict == "partial" and block.kind is Kind.CAUSAL and len(block.queries) <= step:
            yield Tile(block.queries, block.keys, self._additive(block.queries, block.keys), causal=True)
            return
        for start in range(block.queries.start, block.queries.stop, step):
            queries = range(start, min(start + step, block.queries.stop))
            yield from self._cut(queries, meet(block.keys, self.pattern.needs(queries)))

    def _cut(self, queries: range, keys: range) -> Iterator[Tile]:
        """A piece of a block, looked at anew: it may be empty or full where the block is not."""
        kind = self.pattern.kind(queries, keys)
        verdict = self._verdict(queries, keys) if kind is not Kind.EMPTY else "empty"
        if verdict == "empty":
            return
        mask = self._additive(queries, keys) if verdict == "partial" else None
        if kind is not Kind.FULL:
            band = self._band(queries, keys)
            hidden = torch.full((), HIDDEN, dtype=self.dtype, device=self.device)
            mask = torch.where(band, hidden.new_zeros(()) if mask is None else mask, hidden)
            mask = mask if mask.dim() == 4 else mask[None, None]
        yield Tile(queries, keys, mask)

    def _verdict(self, queries: range, keys: range) -> str:
        if not self.mask.text:
            return "full"
        spans = {"b": range(self.batch), "h": range(self.heads), "q": queries, "k": keys}
        return self.mask.kind(spans, self.sources)

    def _additive(self, queries: range, keys: range) -> Tensor:
        return self.mask.block(self.batch, self.heads, queries, keys, self.sources, self.dtype, self.device)

    def _band(self, queries: range, keys: range) -> Tensor:
        """Which key (column) a query (row) sees by the pattern."""
        places, rows = (torch.arange(span.start, span.stop, device=self.device) for span in (keys, queries))
        away = places - rows[:, None]
        return (self.pattern.low <= away) & (away < self.pattern.high)

    def _queries_at_once(self, keys: int) -> int:
        batch, heads = (size if axis in self._axes else 1 for axis, size in (("b", self.batch), ("h", self.heads)))
        return max(1, MASK_ELEMENTS // (batch * heads * keys))
