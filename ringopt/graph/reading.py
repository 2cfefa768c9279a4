"""What was read of a site's mask and scores, in the form that the attention operators take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ringopt.graph.bands import Known, split
from ringopt.graph.mask import Mask
from ringopt.graph.mask_names import name_of_mask
from ringopt.graph.nodes import op_name, shape_of
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

    @property
    def notes(self) -> list[str]:
        """For the report: what is computed whole rows at a time."""
        tables = dict.fromkeys(load.source for load in loads(*self.mask.terms) if "r" in load.axes)
        return [
            f"{op_name(node) or node.name} {list(shape_of(node))} is not read element by element: every rank computes "
            "the rows of its own queries"
            for node in (self.sources[number] for number in tables)
        ]


def reading_of(
    conditions: Sequence[Term],
    bias: Term | None,
    learned: Callable[[fx.Node], bool],
    score: Term | None = None,
    nan: bool = False,
    known: Known | None = None,
) -> Reading:
    """A key is seen where all conditions hold; `bias` is added to the score, `score` done to it before."""
    pattern, rest = split(conditions, known)
    terms = (every(rest) if rest else None, bias, score)
    sources = tuple(dict.fromkeys(load.source for load in loads(*terms)))
    numbers = {source: i for i, source in enumerate(sources)}
    visible, added, modifier = (part and substitute(part, sources=numbers) for part in terms)
    mask = Mask(visible, added, modifier, nan)
    return Reading(pattern, mask, sources, name_of_mask(pattern, rest, bias, learned, score))
