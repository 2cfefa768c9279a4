"""From a block of the plan to tiles that a kernel computes: what is hidden is left out, masks are made a piece at a
time.

A program may hide keys by adding a large number, such as -3.4e38, in place of -inf. A row that sees no key then weighs
all its keys alike: their scores vanish in the rounding of the sum. So does what is small in the row's log-sum-exp,
which could no longer tell a tile of ten keys from one of a thousand. Such rows have a `level`, the largest number
added to a score of the row, and their tiles are computed with the level taken off after the rounding. So have rows to
which a large positive number is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ringopt.context_parallel.executor.buffers import Local
from ringopt.context_parallel.executor.mask_facts import MaskFacts
from ringopt.context_parallel.executor.seen_blocks import seen_blocks
from ringopt.context_parallel.geometry.pattern import Band, Kind, Pattern
from ringopt.context_parallel.geometry.strided import Strided
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.context_parallel.plan.exchange import Block
from ringopt.context_parallel.plan.tiling import band_seen, queries_at_once, strip_ends, strips
from ringopt.expr.mask import FAR, Mask, ScoreBlock
from ringopt.expr.terms import axes_of, loads
from ringopt.expr.value_ranges import bounds
from ringopt.hardware.devices import limits_of
from ringopt.kernels.base import HIDDEN, TileInputs, accumulator
from ringopt.kernels.scored import TilePlace

T = TypeVar("T")


@dataclass(frozen=True)
class Tile:
    """Queries x keys (global rows). `mask` is additive, [1|B, 1|Hq, queries, keys], or None; so is `level`, with one
    key. `modified`: the scores are changed before the mask is added. `band`: as in TileInputs. `fused`: the
    kernel makes what the mask hides and adds."""

    queries: range
    keys: range
    mask: Tensor | None = None
    causal: bool = False
    level: Tensor | None = None
    modified: bool = False
    band: tuple[int, int] | None = None
    fused: bool = False

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> TileInputs:
        """For a kernel, with its rows of q, k and v."""
        return TileInputs(q, k, v, scale, self.mask, self.causal, self.band)

    def strips(self, rows: int) -> Iterator[Tile]:
        """The same in pieces of `rows` queries or so; a triangle becomes small triangles and what is before them."""
        ends = strip_ends(len(self.queries), rows)
        if len(ends) == 2 or self.band is not None or self.fused:
            yield self
            return
        for first, end in pairwise(ends):
            own, before = slice(first, end), slice(0, first)
            queries = self.queries[own]
            level = self.level[:, :, own] if self.level is not None else None
            if not self.causal:
                yield replace(self, queries=queries, mask=self._mask_of(own, slice(None)), level=level)
                continue
            if first:
                yield Tile(queries, self.keys[before], self._mask_of(own, before), False, level, self.modified)
            yield Tile(queries, queries, self._mask_of(own, own), True, level, self.modified)

    def piece(self, queries: slice, keys: slice) -> Tile:
        """Some of its queries and keys, of a tile that is no triangle."""
        level = self.level[:, :, queries] if self.level is not None else None
        cut = self._mask_of(queries, keys)
        return replace(self, queries=self.queries[queries], keys=self.keys[keys], mask=cut, level=level)

    def _mask_of(self, queries: slice, keys: slice) -> Tensor | None:
        return self.mask[:, :, queries, keys] if self.mask is not None else None


@dataclass(frozen=True)
class TileScores:
    """What is done to the scores of `batch` x `heads` attentions (heads by number): the pattern's -inf, and a mask over
    `sources`.

    Masks are made in `dtype`, or in its accumulator if the bias is wider: what is finite there may be -inf in 16 bits.
    `local` says where the rank holds the rows of the queries; without, it holds them all. `bands`: whether the kernel
    takes them without a mask. `fuses`: whether there is one that changes scores and makes the mask itself, and `drops`:
    whether that has to compute all tiles. `whole`: whether tiles are as small as if masks had all of batch and heads,
    as the gradients of some have.
    """

    pattern: Pattern
    mask: Mask
    sources: Sequence[Tensor]
    facts: MaskFacts
    batch: int
    heads: range
    dtype: torch.dtype
    device: torch.device
    local: Local | None = None
    bands: bool = False
    fuses: bool = False
    drops: bool = False
    whole: bool = False
    _axes: frozenset[str] = field(init=False)
    _bands: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_axes", frozenset(axes_of([self.mask.visible, self.mask.bias])))
        if self.mask.bias is not None and self.mask.bias.dtype.itemsize > self.dtype.itemsize:
            object.__setattr__(self, "dtype", accumulator(self.dtype))

    def tiles(self, block: Block) -> Iterator[Tile]:
        """The tiles of a block, one at a time. Masks are differentiable in the sources where grad is enabled."""
        verdict = self._verdict(block.queries, block.keys)
        if verdict == "empty":
            return
        modified = self._modifies(block.queries, block.keys)
        large = verdict == "partial" and self.mask.is_as_large_as_scores(self.batch, len(self.heads))
        if self.fuses and (modified or self.drops or large) and (tile := self._fused(block, verdict, modified)):
            yield tile
            return
        if verdict == "full" and block.kind is not Kind.PARTIAL:
            # Here 0 is added: what is far below that elsewhere leaves the level at 0.
            level = self.level(block.queries) if self._added[1] >= FAR else None
            yield Tile(block.queries, block.keys, None, block.kind is Kind.CAUSAL, level, modified)
            return
        band = band_seen(self.pattern, block.queries, block.keys) if self.bands and verdict == "full" else None
        if band is not None and not modified and self._added[1] < FAR:
            yield Tile(block.queries, block.keys, band=band)
            return
        step = self._queries_at_once(len(block.keys))
        if verdict == "partial" and block.kind is Kind.CAUSAL and len(block.queries) <= step and not self._picked:
            mask = self._additive(block.queries, block.keys)
            yield Tile(block.queries, block.keys, mask, True, self.level(block.queries), modified)
            return
        if block.kind is Kind.PARTIAL:
            least = limits_of(self.device.type).least
            step = min(step, queries_at_once(self.pattern, block.queries, block.keys, least))
        for queries, keys in strips(self.pattern, block.queries, block.keys, step):
            yield from self._cut(queries, keys)

    def _fused(self, block: Block, verdict: str, modified: bool) -> Tile | None:
        """The whole block, where the kernel can tell by itself who sees whom. None where rows have a level, or the
        pattern is another."""
        low, high = self._added
        if low <= -FAR or high >= FAR:
            return None
        queries, keys, band = block.queries, block.keys, None
        if block.kind is Kind.PARTIAL:
            if not isinstance(self.pattern, Band) or not queries.step == keys.step == 1:
                return None
            apart = queries.start - keys.start
            band = self.pattern.low + apart, self.pattern.high + apart
        causal = block.kind is Kind.CAUSAL
        return Tile(queries, keys, None, causal, None, modified, band, fused=verdict == "partial")

    def place(self, tile: Tile) -> TilePlace:
        """Where `tile` lies among all rows and heads."""
        return TilePlace(tile.queries, tile.keys, self._local(tile.queries), self.heads.start)

    def _cut(self, queries: range, keys: range) -> Iterator[Tile]:
        """A piece of a block, looked at anew: it may be empty or full where the block is not."""
        kind = self.pattern.kind(queries, keys)
        verdict = self._verdict(queries, keys) if kind is not Kind.EMPTY else "empty"
        if verdict == "empty":
            return
        mask = self._additive(queries, keys) if verdict == "partial" else None
        if kind is not Kind.FULL:
            mask = self._within(mask, queries, keys)
        tile = Tile(queries, keys, mask, False, self.level(queries), self._modifies(queries, keys))
        if mask is None or not self._picked:
            yield tile
            return
        yield from (tile.piece(*at) for at in seen_blocks(mask, limits_of(self.device.type).least))

    def _within(self, mask: Tensor | None, queries: range, keys: range) -> Tensor:
        """`mask` (None: zeros) where the pattern lets a query see a key, else -inf."""
        if mask is None and isinstance(self.pattern, (Band, Strided)):
            return self._band(queries, keys)
        return self._hiding(mask, queries, keys)

    def _band(self, queries: range, keys: range) -> Tensor:
        """Who sees whom there depends on distances, so that most strips of a block have the same mask: it is kept until
        another is made."""
        where = (keys.start - queries.start, len(queries), len(keys), queries.step, keys.step)
        if where not in self._bands:
            self._bands.clear()
            self._bands[where] = self._hiding(None, queries, keys)
        return self._bands[where]

    def _hiding(self, mask: Tensor | None, queries: range, keys: range) -> Tensor:
        hidden = torch.full((), HIDDEN, dtype=self.dtype, device=self.device)
        mask = torch.where(
            seen(self.pattern, queries, keys, self.device), hidden.new_zeros(()) if mask is None else mask, hidden
        )
        return mask if mask.dim() == 4 else mask[None, None]

    def level(self, queries: range) -> Tensor | None:
        """[1|B, 1|Hq, queries, 1]: the largest number added in each row where that is FAR from 0, else 0."""
        if self._added[0] > -FAR and self._added[1] < FAR:
            return None
        asked = ("level", self.mask.text, self.pattern, self.dtype, *self._spans(queries, queries).values())
        return self.facts.once(asked, lambda: self._largest(queries))

    @cached_property
    def _added(self) -> tuple[float, float]:
        """All numbers that are added to scores lie between these."""
        if self.mask.bias is None:
            return 0.0, 0.0
        rows = self.pattern.q_length if self.local is None else self.local.rows
        lengths = (self.batch, self.pattern.q_length, self.pattern.kv_length, rows)
        spans = {axis: range(length) for axis, length in zip("bqkr", lengths, strict=True)} | {"h": self.heads}
        bias = self.mask.bias
        low, high = self._known("added", spans, lambda: bounds(bias, spans, self._read))
        return float(low), float(high)

    @torch.no_grad()
    def _largest(self, queries: range) -> Tensor | None:
        keys, step = self.pattern.needs(queries), self._queries_at_once(len(queries))
        pieces = (range(start, min(start + step, keys.stop)) for start in range(keys.start, keys.stop, step))
        parts = [self._within(self._additive(queries, piece), queries, piece).amax(3, keepdim=True) for piece in pieces]
        largest = torch.stack(parts).amax(0).to(accumulator(self.dtype))
        level = largest.masked_fill((largest.abs() < FAR) | (largest == HIDDEN), 0.0)
        return level if bool(level.any()) else None

    def modified(self, scores: Tensor, queries: range, keys: range) -> Tensor:
        """The scaled scores [B, Hq, queries, keys] as the mask changes them. Differentiable where grad is enabled."""
        return self.mask.modified(scores, self._block(queries, keys), self.sources)

    @cached_property
    def _picked(self) -> bool:
        """Whether numbers that a rank has for its own queries say which keys they see."""
        return any({"r", "k"} <= load.axes for load in loads(self.mask.visible))

    @cached_property
    def _read(self) -> Sequence[Tensor]:
        """The sources where their numbers are read."""
        return self.facts.numbers(self.sources)

    def _verdict(self, queries: range, keys: range) -> str:
        spans = self._spans(queries, keys)
        return self._known("kind", spans, lambda: self.mask.kind(spans, self._read)) if self.mask.text else "full"

    def _modifies(self, queries: range, keys: range) -> bool:
        spans = self._spans(queries, keys)
        asked = self.mask.score is not None
        return asked and self._known("modifies", spans, lambda: self.mask.modifies(spans, self._read))

    def _known(self, asked: str, spans: Mapping[str, range], answer: Callable[[], T]) -> T:
        """What the mask does to a block, asked of it once for all who read the same sources."""
        return self.facts.once((asked, self.mask.text, *spans.values()), answer)

    def _spans(self, queries: range, keys: range) -> dict[str, range]:
        return {"b": range(self.batch), "h": self.heads, "q": queries, "k": keys, "r": self._local(queries)}

    def _local(self, queries: range) -> range:
        """Where the rank holds `queries`."""
        if self.local is None:
            return queries
        place = self.local.slice(queries)
        return range(place.start, place.stop, queries.step)

    def _additive(self, queries: range, keys: range) -> Tensor:
        return self.mask.additive(self._block(queries, keys), self.sources, self.dtype, self.device)

    def _block(self, queries: range, keys: range) -> ScoreBlock:
        return ScoreBlock(self.batch, self.heads, queries, keys, self._local(queries))

    def _queries_at_once(self, keys: int) -> int:
        sizes = (("b", self.batch), ("h", len(self.heads)))
        batch, heads = (size if self.whole or axis in self._axes else 1 for axis, size in sizes)
        return max(1, limits_of(self.device.type).mask // (batch * heads * keys))
