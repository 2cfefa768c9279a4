"""Takes an additive mask apart: who is hidden, and what is added to the scores of who is not.

    where(k <= q, 0, -inf) + where(pad[b, k], -inf, 0)     ->  conditions k <= q, ~pad[b, k]; no bias
    where(k <= q, table[h, k - q], -3.4e38)                ->  condition k <= q; bias table[h, k - q]

-inf hides a key from a query, always. A finite fill does so only in a row that sees another key: its weight is
exp(fill + score - largest score), exactly 0 in every dtype as long as that stays below -746. In a row that sees nothing
all weights are equal instead, so every row must be proven to see a key, by the diagonal or the first or the last key;
left padding is the usual case where none does. What is not proven stays in the bias, as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from ringopt.expr.bands import split
from ringopt.expr.mask import FAR, Mask
from ringopt.expr.simplify import apply, literal, logic, negate, substitute, where
from ringopt.expr.terms import Affine, Apply, Load, Term, affine, axes_of, axis, conjuncts, constant, number
from ringopt.expr.value_ranges import Interval, bounds
from ringopt.ir.symbolic_sizes import is_open
from ringopt.recognize.lift import Cone

# Below this a finite fill hides: two scores that differ by 1e9 in float32 come from no model that still computes.
# float16 holds nothing below -65504, and its scores are so much smaller that the same is true there.
HIDES = -1e9
HIDES_FLOAT16 = torch.finfo(torch.float16).min

# A learned number is taken to be no larger than this; scores are not bounded better.
LEARNED: Interval = (-1e3, 1e3)


@dataclass
class Peeled:
    """A key is seen where all conditions hold. `fills`: the finite values that hidden keys had."""

    conditions: list[Term] = field(default_factory=list)
    bias: Term | None = None
    fills: set[float] = field(default_factory=set)


def peel(mask: Term, cone: Cone, learned: Callable[[fx.Node], bool]) -> Peeled:
    """Of the attn_mask of scaled_dot_product_attention: bool (True is seen) or additive. Equal numbers, for all scores
    that are finite. `learned` says of which sources the numbers are those of a model."""
    if mask.dtype == torch.bool:
        return Peeled(folded(conjuncts(mask), cone))
    lowest = HIDES_FLOAT16 if mask.dtype == torch.float16 else HIDES
    found = Peeled()
    found.bias = rest_of(mask, found, lowest)
    found.conditions = folded(found.conditions, cone)
    if found.fills and not (is_small(found, cone, learned) and every_row_sees_a_key(found.conditions, cone)):
        found = Peeled()
        found.bias = rest_of(mask, found, -math.inf)
        found.conditions = folded(found.conditions, cone)
    return found


def rest_of(term: Term, found: Peeled, lowest: float) -> Term | None:
    """What is added where `term` hides nothing, None for 0; the conditions go to `found`."""
    value = constant(term)
    if value is not None:
        if value <= lowest:
            hide(found, number(False, torch.bool), value)
            return None
        return term if value != 0 else None
    if not isinstance(term, Apply) or term.kwargs:
        return term
    if (chosen := term if term.op == "where" else scaled_choice(term)) is not None:
        return _rest_of_where(chosen, found, lowest)
    if term.op in ("add", "sub") and len(term.args) == 2:
        left, right = (literal(arg, term.dtype) for arg in term.args)
        left_rest = rest_of(left, found, lowest)
        right_rest = rest_of(right if term.op == "add" else apply("neg", [right], term.dtype), found, lowest)
        if left_rest is None or right_rest is None:
            return right_rest if left_rest is None else left_rest
        return apply("add", [left_rest, right_rest], term.dtype)
    return term


def scaled_choice(term: Apply) -> Apply | None:
    """where(c, x, y) * 2 is where(c, x * 2, y * 2)."""
    if term.op not in ("mul", "div"):
        return None
    choice, factor = term.args if term.op == "div" or constant(term.args[0]) is None else term.args[::-1]
    if constant(factor) is None or not isinstance(choice, Apply) or choice.op != "where":
        return None
    condition, *sides = (arg for arg in choice.args if isinstance(arg, Term))
    yes, no = (apply(term.op, [literal(side, term.dtype), factor], term.dtype) for side in sides)
    made = where(condition, yes, no, term.dtype)
    return made if isinstance(made, Apply) and made.op == "where" else None


def _rest_of_where(term: Apply, found: Peeled, lowest: float) -> Term | None:
    condition, yes, no = (arg for arg in term.args if isinstance(arg, Term))
    for holds, kept, filled in ((condition, yes, no), (negate(condition), no, yes)):
        value = constant(filled)
        if value is not None and value <= lowest:
            hide(found, holds, value)
            return rest_of(kept, found, lowest)
    sides = (Peeled(), Peeled())
    rests = [rest_of(branch, side, lowest) for branch, side in zip((yes, no), sides, strict=True)]
    if rests[0] is not rests[1] or not (sides[0].conditions or sides[1].conditions):
        return term
    # both branches choose between the same and hidden: (c & seen if c) | (~c & seen if not c)
    seen = [every(side.conditions) for side in sides]
    either = logic(
        "logical_or", logic("logical_and", condition, seen[0]), logic("logical_and", negate(condition), seen[1])
    )
    found.conditions += conjuncts(either)
    found.fills |= sides[0].fills | sides[1].fills
    return rests[0]


def hide(found: Peeled, condition: Term, fill: float) -> None:
    """Adds to `found` that the query sees the key only where `condition` holds, and what it is filled with
    elsewhere."""
    found.conditions += conjuncts(condition)
    if fill != -math.inf:
        found.fills.add(fill)


def every(conditions: list[Term]) -> Term:
    """The conjunction of `conditions`; True without any."""
    total = number(True, torch.bool)
    for condition in conditions:
        total = logic("logical_and", total, condition)
    return total


def folded(conditions: list[Term], cone: Cone) -> list[Term]:
    """Each condition once, without those that always hold."""
    kept = dict.fromkeys(cone.fold(condition) for condition in conditions)
    return [condition for condition in kept if constant(condition) is not True]


# ---- may a finite fill hide? -----------------------------------------------------------------------------------------
def is_small(found: Peeled, cone: Cone, learned: Callable[[fx.Node], bool]) -> bool:
    """Whether no bias can make up for a fill, or be one itself: numbers of the model and known numbers only."""

    def assumed(load: Load) -> Interval | None:
        return LEARNED if learned(load.source) else None

    if found.bias is None:
        return True
    low, high = bounds(found.bias, cone.spans, cone.known, assumed)
    return bool(max(-low, high) <= -max(found.fills) / 8)


def every_row_sees_a_key(conditions: list[Term], cone: Cone) -> bool:
    """Proven by one key that all conditions let every query see: its own, the first or the last."""

    def witnesses() -> Iterator[Affine]:
        if cone.sizes["q"] <= cone.sizes["k"]:
            yield axis("q")
        yield affine({}, 0)
        if not is_open(cone.sizes["k"]):
            yield affine({}, cone.sizes["k"] - 1)

    return any(
        all(constant(cone.fold(substitute(condition, {"k": key}))) is True for condition in conditions)
        for key in witnesses()
    )


@dataclass(frozen=True)
class Hidden:
    """What a mask hides: later keys when `causal`, those for which `seen` (over b and k) does not hold, and all keys
    from a query for which `sees` (over b and q) does not."""

    causal: bool
    seen: Term | None
    sees: Term | None


def hidden(pattern: str, mask: Mask) -> Hidden | str:
    """The mask of a dilated attention: whether it is causal, and its conditions on keys and on queries; or why it has
    none that composes with dilation, a clause of the report."""
    if mask.score is not None:
        return "its scores go through a function"
    found = Peeled(conjuncts(mask.visible) if mask.visible is not None else [])
    if mask.bias is not None and rest_of(mask.bias, found, -FAR) is not None:
        return "a bias is added to its scores"
    band, conditions = split(found.conditions)
    bands = {pattern, band} - {"full"}
    if bands - {"causal"}:
        return f"a {' and '.join(sorted(bands))} mask does not compose with dilation"
    of_queries = [condition for condition in conditions if "q" in condition.axes and condition.axes <= {"b", "q"}]
    of_keys = [condition for condition in conditions if condition not in of_queries]
    axes = axes_of(of_keys)
    if not axes <= {"b", "k"}:
        differs = {"q": "differs by query", "h": "differs by head", "r": "differs by query"}
        return f"its mask {next(differs[axis] for axis in 'qrh' if axis in axes)}, and is no padding of keys"
    return Hidden(bool(bands), *(every(some) if some else None for some in (of_keys, of_queries)))
