"""What was read of a site's scores, held against the program's own: while compiling, where no input reaches the mask.

A difference would be a fault of ringopt; the site then stays as it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.visibility import seen
from ringopt.expr.bands import Known
from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import ScoreBlock
from ringopt.expr.terms import Term, walk
from ringopt.ir.symbolic_sizes import at_hand
from ringopt.recognize.additive_mask import HIDES_FLOAT16
from ringopt.recognize.reading import Reading, reading_of
from ringopt.recognize.score_mod import widened
from ringopt.recognize.scores import NotAttention, Scores
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# A mask of more elements is compared at some blocks of BLOCK x BLOCK instead of whole.
BLOCK, BLOCKS = 64, 12

Original = Callable[[range, range], Tensor]


def of_mask(
    reading: Reading, sizes: Mapping[str, int], known: Mapping[Any, Tensor], dtype: torch.dtype, original: Original,
    whole: bool,
) -> str:  # fmt: skip
    """Where the reading of a mask differs from what `original` gives for some rows and keys; "" where it does not. With
    `whole` all of it is compared."""
    kind = dtype if dtype.is_floating_point else torch.float32
    sources, pattern = (
        [known[source] for source in reading.sources],
        pattern_of(reading.pattern, sizes["q"], sizes["k"]),
    )
    with unset_fake_temporarily(), torch.no_grad():
        for rows, keys in [(range(sizes["q"]), range(sizes["k"]))] if whole else blocks(sizes):
            total = reading.mask.additive(ScoreBlock(sizes["b"], sizes["h"], rows, keys), sources, kind)
            found = total.masked_fill(~seen(pattern, rows, keys), -math.inf)
            if not _agree(original(rows, keys), found):
                return _mismatch(reading, rows, keys)
    return ""


def of_scores(
    reading: Reading, scores: Scores, sizes: Mapping[str, int], known: Mapping[Any, Tensor], term: Term
) -> str:
    """As `of_mask`, of what is done to scores: `term` is that, as a function of the product."""
    sources, pattern = (
        [known[source] for source in reading.sources],
        pattern_of(reading.pattern, sizes["q"], sizes["k"]),
    )
    asked = replace(reading.mask, visible=None, bias=None).asks
    every = [sizes[axis] if axis in asked else -1 for axis in "bh"]  # what the function of the score tells apart
    draw = torch.Generator().manual_seed(0)
    rounding = max(torch.finfo(each.dtype).eps for each in walk(term) if each.dtype.is_floating_point)
    term = widened(term, torch.float64)
    with unset_fake_temporarily(), torch.no_grad():
        for rows, keys in blocks(sizes):
            product = torch.randn(1, 1, len(rows), len(keys), generator=draw, dtype=torch.float64)
            block = ScoreBlock(sizes["b"], sizes["h"], rows, keys)
            place = block.coordinates()
            original = evaluate(term, {**place, "r": place["q"], "score": product}, known)
            scaled = product * scores.scale
            for factor in scores.factors:
                scaled = scaled * evaluate(factor, place, known)
            total = reading.mask.modified(scaled.expand(*every, -1, -1), block, sources)
            total = total + reading.mask.additive(block, sources, torch.float64)
            found = total.masked_fill(~seen(pattern, rows, keys), -math.inf)
            if not _agree(original.double().expand_as(found), found, max(8 * rounding, 1e-4)):
                return _mismatch(reading, rows, keys)
    return ""


def reading_of_scores(
    scores: Scores, known: Known, learned: Callable[[fx.Node], bool], original: Term | None
) -> Reading:
    """What is done to scores, as the attention operators take it. `original` is that as a function of the product,
    where no input reaches it. Raises NotAttention where both differ."""
    stops = scores.nan and scores.stops
    reading = reading_of(scores.conditions, scores.bias, learned, scores.score, scores.nan, known, stops)
    if original is not None and not scores.shifts:
        sizes = {name: at_hand(size) for name, size in known.sizes.items()}
        difference = of_scores(reading, scores, sizes, known.tensors, original)
        if difference:
            raise NotAttention(difference)
    return reading


def _mismatch(reading: Reading, rows: range, keys: range) -> str:
    return (
        f"the mask read as {reading.name} differs from the program's own in queries {rows.start} to {rows.stop - 1}, "
        f"keys {keys.start} to {keys.stop - 1}: a fault of ringopt, please report it"
    )


def blocks(sizes: Mapping[str, int]) -> list[tuple[range, range]]:
    """On the diagonal, at the corners and anywhere; the same on every rank."""
    q, k = sizes["q"], sizes["k"]
    if q <= BLOCK and k <= BLOCK:
        return [(range(q), range(k))]
    draw = random.Random(0)
    starts = [(0, 0), (q - BLOCK, k - BLOCK), (0, k - BLOCK), (q - BLOCK, 0)]
    starts += [(place, place) for place in (draw.randrange(min(q, k)) for _ in range(BLOCKS))]
    starts += [(draw.randrange(q), draw.randrange(k)) for _ in range(BLOCKS)]
    return [(_range_at(i, q), _range_at(j, k)) for i, j in starts]


def _range_at(start: int, length: int) -> range:
    return range(max(start, 0), min(max(start, 0) + BLOCK, length))


def _agree(original: Tensor, found: Tensor, tolerance: float = 0.0) -> bool:
    hidden = found == -math.inf
    if original.dtype == torch.bool:
        return bool((original == ~hidden).all())
    same = (original == found) | (original.isnan() & found.isnan())
    if tolerance:  # of what is infinite every number would be within it
        same |= original.isfinite() & ((original - found).abs() <= tolerance * (1 + original.abs()))
    return bool(torch.where(hidden, original <= HIDES_FLOAT16, same).all())
