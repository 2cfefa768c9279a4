"""What was read of a site's mask and scores, in the form that the attention operators take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ringopt.graph.bands import split
from ringopt.graph.mask import Mask
from ringopt.graph.mask_names import name_of_mask
from ringopt.graph.peel import every
from ringopt.graph.term_folding import substitute
from ringopt.graph.terms import Term, loads


@dataclass(frozen=True)
class Reading:
    """`mask` refers to `sources` by number; `name` is for the report."""

    pattern: str
    mask: Mask
    sources: tuple[fx.Node, ...]
    name: str


def reading_of(
    conditions: Sequence[Term],
    bias: Term | None,
    learned: Callable[[fx.Node], bool],
    score: Term | None = None,
    nan: bool = False,
) -> Reading:
    """A key is seen where all conditions hold; `bias` is added to the score, `score` done to it before."""
    pattern, rest = split(conditions)
    terms = (every(rest) if rest else None, bias, score)
    sources = tuple(dict.fromkeys(load.source for load in loads(*terms)))
    numbers = {source: i for i, source in enumerate(sources)}
    visible, added, modifier = (part and substitute(part, sources=numbers) for part in terms)
    mask = Mask(visible, added, modifier, nan)
    return Reading(pattern, mask, sources, name_of_mask(pattern, rest, bias, learned, score))
