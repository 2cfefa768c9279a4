"""Which key a query sees by a pattern, as a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.block_sparse import BLOCKS, Blocks
from ringopt.context_parallel.geometry.parse import pattern_of
from ringopt.context_parallel.geometry.pattern import Band, Pattern
from ringopt.context_parallel.geometry.segmented import DOCUMENTS, Chunked, TwoStretches
from ringopt.context_parallel.geometry.strided import Strided
from ringopt.ir.symbolic_sizes import LONGEST


def seen(pattern: Pattern, queries: range, keys: range, device: torch.device | None = None) -> Tensor:
    """[queries, keys], bool."""
    if isinstance(pattern, Blocks):
        return listed(pattern, queries, keys, device)
    rows, places = (torch.arange(some.start, some.stop, some.step, device=device) for some in (queries, keys))
    if (found := by_formula(pattern, rows[:, None], places)) is not None:
        return found
    spans = [pattern.span(query) for query in queries]
    ends = [[span.start for span in spans], [span.stop for span in spans]]
    starts, stops = torch.tensor(ends, dtype=torch.int64, device=device).unsqueeze(-1).unbind()
    return (starts <= places) & (places < stops)


def seen_whole(text: str, queries: Any, keys: Any, device: torch.device | None = None) -> Tensor:
    """[queries, keys], bool: all pairs of so many by the pattern that `text` names. The sizes may be open but where it
    is a list that ends with them, which no pass makes of open ones."""
    if DOCUMENTS.fullmatch(text) or BLOCKS.fullmatch(text):
        queries, keys = int(queries), int(keys)
        return seen(pattern_of(text, queries, keys), range(queries), range(keys), device)
    rows, places = torch.arange(queries, device=device), torch.arange(keys, device=device)
    found = by_formula(pattern_of(text, LONGEST, LONGEST), rows[:, None], places)
    assert found is not None, text
    return found


def by_formula(pattern: Pattern, queries: Tensor, keys: Tensor) -> Tensor | None:
    """Which of `keys` are seen from `queries`, shaped to broadcast; None of a pattern that is a list."""
    if isinstance(pattern, Band):
        away = keys - queries
        return (pattern.low <= away) & (away < pattern.high)
    if isinstance(pattern, Strided):
        away = keys - queries
        low, high = pattern.band.low * pattern.rate, pattern.band.high * pattern.rate
        return (away % pattern.rate == 0) & (low <= away) & (away < high)
    if isinstance(pattern, Chunked):
        together = queries // pattern.size == keys // pattern.size
        return together & (keys <= queries) if pattern.causal else together
    if isinstance(pattern, TwoStretches):
        (first, sinks), (_, near) = pattern.parts
        before, behind = by_formula(sinks, queries, keys), by_formula(near, queries, keys)
        assert before is not None and behind is not None, pattern
        return torch.where(keys < first.stop, before, behind)
    return None


def listed(pattern: Blocks, queries: range, keys: range, device: torch.device | None) -> Tensor:
    """`seen` of a list of blocks: its table as a tensor, looked up."""
    if not queries or not keys:
        return torch.zeros(len(queries), len(keys), dtype=torch.bool, device=device)
    high, wide = pattern.sizes
    first, blocks = queries[0] // high, range(keys[0] // wide, keys[-1] // wide + 1)
    table = [
        [any(block in run for run in pattern.listed[number]) for block in blocks]
        for number in range(first, queries[-1] // high + 1)
    ]
    query, key = (torch.arange(some.start, some.stop, device=device) for some in (queries, keys))
    place = (query[:, None] // high - first, key // wide - blocks[0])
    found = torch.tensor(table, device=device)[place]
    return found & (key <= query[:, None]) if pattern.causal else found
