"""Which key a query sees by a pattern, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.context_parallel.geometry.block_sparse import Blocks
from ringopt.context_parallel.geometry.pattern import Band, Pattern
from ringopt.context_parallel.geometry.segmented import Beside
from ringopt.context_parallel.geometry.strided import Strided


def seen(pattern: Pattern, queries: range, keys: range, device: torch.device | None = None) -> Tensor:
    """[queries, keys], bool."""
    if isinstance(pattern, Beside):
        parts = [seen(part, queries, some, device) for some, part in pattern.each(keys)]
        return torch.cat([torch.zeros(len(queries), 0, dtype=torch.bool, device=device), *parts], 1)
    if isinstance(pattern, Blocks):
        return listed(pattern, queries, keys, device)
    places = torch.arange(keys.start, keys.stop, keys.step, device=device)
    if isinstance(pattern, (Band, Strided)):
        away = places - torch.arange(queries.start, queries.stop, queries.step, device=device)[:, None]
        if isinstance(pattern, Band):
            return (pattern.low <= away) & (away < pattern.high)
        low, high = pattern.band.low * pattern.rate, pattern.band.high * pattern.rate
        return (away % pattern.rate == 0) & (low <= away) & (away < high)
    spans = [pattern.span(query) for query in queries]
    ends = [[span.start for span in spans], [span.stop for span in spans]]
    starts, stops = torch.tensor(ends, dtype=torch.int64, device=device).unsqueeze(-1).unbind()
    return (starts <= places) & (places < stops)


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
