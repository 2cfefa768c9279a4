"""Masks whose values are all known at compile time, as a list of blocks: block-sparse attention.

They are computed for every pair of query and key, or once a block, where a position counts only as `position // b`. In
that table the largest blocks are found that are full or empty. Where these are too small, or heads see different keys,
the list has blocks of a fixed size around the visible pairs, and the conditions stay in the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringopt.expr.evaluate import evaluate
from ringopt.expr.mask import ScoreBlock
from ringopt.expr.terms import Affine, Apply, Load, Score, Term, axes_of, axis, children, walk
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

LEAST = 4  # tokens of a block: a list of smaller ones is no shorter than the mask
MOST_RUNS = 4096  # runs of adjacent blocks: they are part of the graph's text
AROUND = (16, 128)  # blocks around visible pairs: tokens of one at least, blocks along a side at most
WORTH = 0.75  # the largest share of all blocks at which a list around visible pairs pays
PAIRS, AT_ONCE = 1 << 24, 1 << 22  # pairs of query and key that are computed, in total and at a time

Sizes = tuple[int, int]  # queries and keys


def block_list(
    conditions: Sequence[Term], causal: bool, tensors: Mapping[Any, Tensor], sizes: Mapping[str, Any]
) -> tuple[str, list[Term]] | None:
    """The pattern `blocks(...)` around the known ones of `conditions` (with k <= q if `causal`), and those of them that
    it expresses exactly. `sizes`: lengths of the axes. None where no condition is known, or a list does not pay."""
    known = [condition for condition in conditions if is_known(condition, tensors)]
    axes = axes_of(known)
    if not known or any(not isinstance(sizes.get(name), int) for name in axes):
        return None
    steps = step_of(known, "q"), step_of(known, "k")
    lengths = -(-sizes["q"] // steps[0]), -(-sizes["k"] // steps[1])
    if math.prod(lengths) * math.prod(sizes[name] for name in axes - {"q", "k"}) > PAIRS:
        return None
    with unset_fake_temporarily(), torch.no_grad():
        seen, alike = table_of(known, tensors, sizes, steps)
        everything = torch.ones_like(seen)
        if steps == (1, 1) and (causal or not bool(seen.triu(1).any())):
            causal, seen, everything = True, seen.tril(), everything.tril()
        exact = largest(seen, everything)
        around = blocks_around(lengths[0], steps[0]), blocks_around(lengths[1], steps[1])
        for blocks in (exact, around):
            rows, keys = (block * step for block, step in zip(blocks, steps, strict=True))
            found, most = pooled(seen, blocks), pooled(everything, blocks)
            covered = known if alike and blocks == exact else []
            part = float(found.sum()) / float(most.sum())
            if min(rows, keys) >= LEAST and number_of_runs(found) <= MOST_RUNS and part < (1 if covered else WORTH):
                return f"blocks({rows}x{keys};{text_of(found.tolist())}{'' if causal else ',both'})", covered
    return None


def is_known(condition: Term, tensors: Mapping[Any, Tensor]) -> bool:
    """Whether a condition depends on q and k, on no score, and on no tensor but `tensors`."""
    below = list(walk(condition))
    sources = {each.source for each in below if isinstance(each, Load)}
    return (
        {"q", "k"} <= condition.axes <= set("bhqk")
        and all(source in tensors for source in sources)
        and not any(isinstance(each, Score) for each in below)
    )


def step_of(terms: Sequence[Term], name: str) -> int:
    """b, where positions on an axis occur only as position // b (or // 2b, // 3b ...), else 1."""
    step = 0
    for term in walk(*terms):
        for child in children(term):
            if isinstance(child, Affine) and name in child.axes:
                divided = isinstance(term, Apply) and term.op == "floor_divide" and child is axis(name)
                size = term.args[1] if isinstance(term, Apply) and divided else 1
                step = math.gcd(step, size if isinstance(size, int) and size > 0 else 1)
    return step or 1


def table_of(
    conditions: Sequence[Term], tensors: Mapping[Any, Tensor], sizes: Mapping[str, int], steps: Sizes
) -> tuple[Tensor, bool]:
    """A bool table [queries, keys] at every `steps`-th position: the union over batch and heads; and whether all
    batches and heads see the same."""
    axes = axes_of(conditions)
    batch, heads = (sizes[name] if name in axes else 1 for name in "bh")
    keys, parts, alike = torch.arange(0, sizes["k"], steps[1]), [], True
    for rows in torch.arange(0, sizes["q"], steps[0]).split(max(1, AT_ONCE // (batch * heads * len(keys)))):
        place = ScoreBlock(batch, heads, rows, keys).coordinates()
        seen = torch.ones(batch, heads, len(rows), len(keys), dtype=torch.bool)
        for condition in conditions:
            seen = seen & evaluate(condition, place, tensors)
        parts.append(seen.any(0).any(0))
        alike = alike and bool((seen == parts[-1]).all())
    return torch.cat(parts), alike


def largest(seen: Tensor, where: Tensor) -> Sizes:
    """The largest block size whose blocks are constant in `seen`, as far as `where` holds: a lower triangle, or all."""
    down = ((seen[1:] != seen[:-1]) & where[:-1]).any(1).nonzero() + 1
    across = ((seen[:, 1:] != seen[:, :-1]) & where[:, 1:]).any(0).nonzero() + 1
    rows, keys = (math.gcd(0, *edges.flatten().tolist()) for edges in (down, across))
    return rows or seen.shape[0], keys or seen.shape[1]


def blocks_around(length: int, step: int) -> int:
    """The size of a block around visible pairs, in entries of a table of `length`, each of `step` tokens."""
    least, most = AROUND
    return max(-(-least // step), -(-length // most))


def pooled(seen: Tensor, blocks: Sizes) -> Tensor:
    """Max pooling: [blocks of queries, blocks of keys], True where some pair of the block is visible."""
    rows, keys = (-(-length // block) for length, block in zip(seen.shape, blocks, strict=True))
    padded = F.pad(seen, (0, keys * blocks[1] - seen.shape[1], 0, rows * blocks[0] - seen.shape[0]))
    return padded.view(rows, blocks[0], keys, blocks[1]).any(3).any(1)


def number_of_runs(found: Tensor) -> int:
    """The number of runs of True along the last dim."""
    return int(F.pad(found, (1, 0)).int().diff(dim=1).clamp(min=0).sum())


def text_of(found: Sequence[Sequence[bool]]) -> str:
    """The runs of True of each row: "0:1;0:2;0:1+3:5", the notation of context_parallel/geometry/block_sparse.py."""
    return ";".join("+".join(f"{start}:{stop}" for start, stop in _runs_of(row)) for row in found)


def _runs_of(row: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [i for i, (before, after) in enumerate(zip((False, *row), (*row, False), strict=True)) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))
