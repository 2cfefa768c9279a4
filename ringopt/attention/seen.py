"""Which key a query sees by a pattern, as a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ringopt.attention.patterns import Band, Pattern
from ringopt.attention.structures import Beside


def seen(pattern: Pattern, queries: range, keys: range, device: torch.device | None = None) -> Tensor:
    """[queries, keys], bool."""
    if isinstance(pattern, Beside):
        parts = [seen(part, queries, some, device) for some, part in pattern.each(keys)]
        return torch.cat([torch.zeros(len(queries), 0, dtype=torch.bool, device=device), *parts], 1)
    places = torch.arange(keys.start, keys.stop, device=device)
    if isinstance(pattern, Band):
        away = places - torch.arange(queries.start, queries.stop, device=device)[:, None]
        return (pattern.low <= away) & (away < pattern.high)
    spans = [pattern.span(query) for query in queries]
    starts, stops = (torch.tensor([[getattr(span, end)] for span in spans], device=device) for end in ("start", "stop"))
    return (starts <= places) & (places < stops)
