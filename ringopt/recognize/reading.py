"""What was read of a site's mask and scores, in the form that the attention operators take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from ringopt.expr.bands import DIFFERENCE, Known, band_of, split
from ringopt.expr.mask import Mask
from ringopt.expr.simplify import substitute
from ringopt.expr.terms import Affine, Apply, Term, affine, loads, number, walk
from ringopt.expr.value_ranges import bounds
from ringopt.ir.nodes import op_name, shape_of
from ringopt.ir.notes import ROWS_OF
from ringopt.ir.symbolic_sizes import longest
from ringopt.recognize.additive_mask import every
from ringopt.recognize.mask_names import name_of_mask


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
            for node in dict.fromkeys(map(table_of, (self.sources[number] for number in tables)))
        ]


def reading_of(
    conditions: Sequence[Term],
    bias: Term | None,
    learned: Callable[[fx.Node], bool],
    score: Term | None = None,
    nan: bool = False,
    known: Known | None = None,
    stops: bool = False,
) -> Reading:
    """A key is seen where all conditions hold; `bias` is added to the score, `score` done to it before."""
    pattern, rest = split(conditions, known)
    if known is not None:
        bias, score = (part and where_seen(part, conditions, known.sizes, learned) for part in (bias, score))
    terms = (every(rest) if rest else None, bias, score)
    sources = tuple(dict.fromkeys(load.source for load in loads(*terms)))
    numbers = {source: i for i, source in enumerate(sources)}
    visible, added, modifier = (part and substitute(part, sources=numbers) for part in terms)
    mask = Mask(visible, added, modifier, nan, stops)
    return Reading(pattern, mask, sources, name_of_mask(pattern, rest, bias, learned, score))


# ---- only where the query sees the key -------------------------------------------------------------------------------
AWAY = "k - q"


def where_seen(
    term: Term, conditions: Sequence[Term], sizes: Mapping[str, Any], learned: Callable[[fx.Node], bool]
) -> Term:
    """`term` without choices that the conditions on k - q decide: of a pair that is not seen nothing is asked."""
    bands = [band for condition in conditions if (band := band_of(condition)) is not None]
    spans = {name: range(longest(size)) for name, size in sizes.items()}
    low = max(1 - len(spans["q"]), *(band[0] for band in bands)) if bands else 0
    high = min(len(spans["k"]) - 1, *(band[1] for band in bands)) if bands else 0
    if not bands or low > high:
        return term
    spans |= {"r": spans["q"], AWAY: range(int(low), int(high) + 1)}
    # Not in the places of loads: these are read for unseen pairs as well, and have to be inside.
    kept: dict[Term, Term] = {each: each for each in loads(term)}
    found = substitute(term, leaves=kept | decided(term, spans))
    lost = _tables_of(term, learned) - _tables_of(found, learned)
    return term if lost else found  # a tensor that is not read would have no gradient, where the program has zeros


def _tables_of(term: Term, learned: Callable[[fx.Node], bool]) -> set[fx.Node]:
    return {table_of(each.source) for each in loads(term) if learned(each.source)}


def table_of(source: fx.Node) -> fx.Node:
    """What a moved copy (ringopt/recognize/row_sources.py) is a copy of."""
    found: fx.Node = source.meta.get(ROWS_OF, source)
    return found


def decided(term: Term, spans: Mapping[str, range]) -> dict[Term, Term]:
    """The conditions of choices that are the same for all of `spans`."""
    choices = [each for each in walk(term) if isinstance(each, Apply) and each.op == "where"]
    found: dict[Term, Term] = {}
    for condition in {each.args[0] for each in choices if isinstance(each.args[0], Term)}:
        always, ever = bounds(over_difference(condition), spans, {})
        if always == ever:
            found[condition] = number(always, torch.bool)
    return found


def over_difference(term: Term) -> Term:
    """`term`, of which coordinates that are multiples of k - q have one axis of their own."""
    places: dict[Term, Term] = {each: _differences(each) for each in walk(term) if isinstance(each, Affine)}
    return substitute(term, leaves=places)


def _differences(place: Affine) -> Affine:
    steps = dict(place.steps)
    if not steps or steps != {name: steps.get("k", 0) * sign for name, sign in DIFFERENCE}:
        return place
    return affine({AWAY: steps["k"]}, place.start, place.dtype)
