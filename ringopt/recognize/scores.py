"""Takes the elements of scores apart: a product of query and key, what is done to it, and who is hidden.

    where(k <= q, product / 8 + table[h, k - q], -inf)      scale 1/8; bias table[h, k - q]; condition k <= q
    tanh(product / 8 / 30) * 30                              scale 1/8; score 30 * tanh(score / 30)
    product * temperature[h]                                 factor temperature[h], for the query
    where(pad[b, k], -1e9, product)                          see below

The walk goes from outside in, as long as it meets sums, factors and choices; what is left around the product is a
function of the score. A finite fill hides a key only where its row provably sees another
(ringopt/recognize/additive_mask.py). Else it stays: where(c, x, fill) is where(c, x, 0) + where(c, 0, fill), which
gives a row that sees nothing the equal weights that the program gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from ringopt.dims.origin import is_of_model
from ringopt.expr.simplify import apply, literal, logic, negate, substitute, where
from ringopt.expr.terms import (
    Apply,
    Cast,
    Load,
    Term,
    constant,
    loads,
    number,
    score,
    walk,
)
from ringopt.expr.value_ranges import bounds
from ringopt.ir.nodes import op_name
from ringopt.recognize.additive_mask import (
    HIDES,
    HIDES_FLOAT16,
    Peeled,
    every_row_sees_a_key,
    folded,
    hide,
    is_small,
    rest_of,
)
from ringopt.recognize.lift import Cone
from ringopt.recognize.score_mod import learns, stays_finite, widened

TRUE = number(True, torch.bool)

# A score that is added to this, or to less, is lost in it, in every dtype.
ABSORBS = -1e20


class NotAttention(Exception):
    """The scores are no function of one product that attention could compute; `look_alike`: nor is it meant to be."""

    def __init__(self, sentence: str, look_alike: bool = False):
        self.sentence, self.look_alike = sentence, look_alike
        super().__init__(sentence)


@dataclass
class Scores:
    """scale * factors * product, through `score`, plus `bias`, where all `conditions` hold.

    factors   terms that are no constants and the same for all keys: the query is multiplied with them
    score     a term of `Score`, None for the score itself
    shifts    what was added to whole rows, which softmax does not see
    nan       a row may see no key, and softmax then makes it NaN
    stops     where that is so, no gradient reaches its scores: they were filled
    """

    scale: float = 1.0
    factors: list[Term] = field(default_factory=list)
    conditions: list[Term] = field(default_factory=list)
    bias: Term | None = None
    score: Term | None = None
    shifts: list[Term] = field(default_factory=list)
    nan: bool = False
    stops: bool = False


def peel_scores(
    term: Term,
    product: Load,
    cone: Cone,
    learned: Callable[[fx.Node], bool],
    made_of: Callable[[fx.Node], bool],
    kept: Sequence[Term] | None = None,
) -> Scores:
    """Of the element `term` that softmax is given, over b, h, q, k. `made_of` says which nodes are computed from the
    product; where not all of `kept` hold, weights are put to 0 after the softmax. Raises NotAttention."""
    lowest = HIDES_FLOAT16 if term.dtype == torch.float16 else HIDES

    def small(term: Term, fill: float) -> bool:
        return is_small(Peeled(bias=term, fills={fill}), cone, learned)

    walker = Walker(product, made_of, small, lowest)
    walker.walk(term)
    if kept is not None:
        if set(folded(list(kept), cone)) != set(folded(walker.found.conditions, cone)):
            raise NotAttention("the weights are put to 0 under another mask than that of the scores")
        if walker.found.fills and not is_small(walker.found, cone, lambda node: learned(node) or is_of_model(node)):
            raise NotAttention("hidden scores are finite, and what is added to others may be as low")
    elif walker.found.fills and not _proven(walker.found, cone, learned):
        walker = Walker(product, made_of, small, -math.inf)
        walker.walk(term)
        if walker.sums and not walker.stays_above(cone):
            raise NotAttention("scores are bounded below after a mask is added, and a row may have no other")
    return walker.scores(cone, learned)


def _proven(found: Peeled, cone: Cone, learned: Callable[[fx.Node], bool]) -> bool:
    found.conditions = folded(found.conditions, cone)
    return is_small(found, cone, learned) and every_row_sees_a_key(found.conditions, cone)


class Walker:
    """One walk. `found` has conditions and bias; `gate`: where it does not hold, a fill has replaced the score."""

    def __init__(
        self, product: Load, made_of: Callable[[fx.Node], bool], small: Callable[[Term, float], bool], lowest: float
    ):
        self.product, self.made_of, self.small, self.lowest = product, made_of, small, lowest
        self.found = Peeled()
        self.gate: Term = TRUE
        self.constant = 1.0
        self.factors: list[Term] = []
        self.shifts: list[Term] = []
        self.floor = -math.inf
        self.terms: list[Term] = []  # all that is added, from softmax down
        self.outside = 0  # how many of them are added to what was filled before
        self.hidden_by_sum = False
        self.sums: list[Term] = []  # what is added to scores, may be as low as the floor, and is raised to it
        self.rest: Term = product

    def has(self, term: object) -> bool:
        return isinstance(term, Term) and self.product in set(walk(term))

    def walk(self, term: Term) -> None:
        following: Term | None = term
        while following is not None and following is not self.product:
            self.rest = following
            following = self.inner(following)
        if following is not None:
            self.rest = following

    def inner(self, term: Term) -> Term | None:
        """The operand that holds the product, after what `term` does to it is noted; None where it cannot be."""
        if isinstance(term, Cast):
            return term.operand if term.operand.dtype.is_floating_point else None
        if not isinstance(term, Apply) or term.kwargs:
            return None
        rule = RULES.get(term.op)
        return rule(self, term) if rule is not None else None

    # ---- one rule an op ----------------------------------------------------------------------------------------------
    def added(self, term: Apply) -> Term | None:
        left, right = (literal(arg, term.dtype) if arg is not None else None for arg in term.args[:2])
        if left is None or right is None or (self.has(left) and self.has(right)):
            return None
        inner, other = (left, right) if self.has(left) else (right, left)
        if term.op == "sub" and inner is left:
            other = apply("neg", [other], term.dtype)
        if self.is_shift(other):
            self.shifts.append(other)
        else:
            self.add(other)
        if term.op == "sub" and inner is right:  # after the other side, which keeps its sign
            self.constant = -self.constant
        return inner

    def stays_above(self, cone: Cone) -> bool:
        """Whether scores with what is added are never raised to the floor. At the floor itself, the gradient of maximum
        goes half to the scores."""
        low, *others = (bounds(each, cone.spans, cone.known)[0] for each in self.sums)
        return not others and self.floor <= ABSORBS and bool(low > self.floor)

    def is_shift(self, term: Term) -> bool:
        """A row's own number, made of its scores: its maximum, which a careful softmax takes off."""
        whole_rows = self.gate is TRUE and not any("k" in each.axes for each in (term, *self.factors))
        return whole_rows and bool(loads(term)) and all(self.made_of(each.source) for each in loads(term))

    def add(self, term: Term) -> None:
        for factor in self.scaled():
            term = apply("mul", [term, factor], term.dtype)
        if self.floor > -math.inf and not self.small(term, self.floor):
            self.sums.append(term)
            self.found.fills.add(self.floor)
        self.terms.append(term)
        before = len(self.found.conditions)
        if self.gate is not TRUE:
            self.to_bias(where(self.gate, term, 0, term.dtype))
        elif (rest := rest_of(term, self.found, self.hiding)) is not None:
            self.to_bias(rest)
        self.hidden_by_sum |= len(self.found.conditions) > before

    @property
    def hiding(self) -> float:
        """What hides, of a fill that is multiplied as the scores are."""
        return self.lowest * max(abs(self.constant), 1.0)

    def to_bias(self, term: Term) -> None:
        bias = self.found.bias
        if bias is not None:
            kind = torch.promote_types(bias.dtype, term.dtype)
            term = apply("add", [literal(bias, kind), literal(term, kind)], kind)
        self.found.bias = term

    def scaled(self) -> list[Term | float]:
        return [*self.factors, *([self.constant] if self.constant != 1.0 else [])]

    def multiplied(self, term: Apply) -> Term | None:
        inner, other = term.args if self.has(term.args[0]) else term.args[::-1]
        if not isinstance(inner, Term) or self.has(other):
            return None
        return self.factor(inner, other if not isinstance(other, Term) else literal(other, term.dtype))

    def divided(self, term: Apply) -> Term | None:
        inner, other = term.args
        if not isinstance(inner, Term) or self.has(other):
            return None
        value = constant(other)
        if value is not None:
            return self.factor(inner, 1.0 / value) if value else None
        return self.factor(inner, apply("reciprocal", [literal(other, term.dtype)], term.dtype))

    def factor(self, inner: Term, other: Term | float | int | bool | str | None) -> Term | None:
        value = constant(other)
        if value is not None:
            self.constant *= float(value)
            return inner
        if not isinstance(other, Term) or "k" in other.axes:
            return None
        self.factors.append(other)
        return inner

    def negated(self, term: Apply) -> Term | None:
        self.constant = -self.constant
        inner = term.args[0]
        return inner if isinstance(inner, Term) else None

    def chosen(self, term: Apply) -> Term | None:
        condition, yes, no = (arg for arg in term.args if isinstance(arg, Term))
        if self.has(condition) or self.has(yes) == self.has(no):
            return None
        holds, inner, fill = (condition, yes, no) if self.has(yes) else (negate(condition), no, yes)
        value = constant(fill)
        if value is None or self.factors or self.constant <= 0:
            return None
        value = max(value * self.constant, self.floor)
        if value <= self.hiding:
            hide(self.found, logic("logical_or", negate(self.gate), holds), value)
            self.outside = len(self.terms)
        else:
            outside = logic("logical_and", self.gate, negate(holds))
            self.to_bias(where(outside, value, 0, _wide(term.dtype)))
            self.gate = logic("logical_and", self.gate, holds)
        return inner

    def bounded(self, term: Apply) -> Term | None:
        """clamp, maximum, minimum by numbers that no score reaches: they turn -inf into a finite fill, nothing else."""
        inner, *limits = term.args if self.has(term.args[0]) else term.args[::-1]
        if term.op == "clamp":
            low, high = (*limits, None)[:2]
        else:
            low, high = (limits[0], None) if term.op == "maximum" else (None, limits[0])
        low, high = (value if value is None else constant(value) for value in (low, high))
        given = [value for value in (low, high) if value is not None]
        if not isinstance(inner, Term) or not given or self.factors or self.constant <= 0:
            return None
        if any(abs(value) < -HIDES_FLOAT16 for value in given) or (low or -1) > 0 or (high or 1) < 0:
            return None
        if low is not None:
            self.floor = max(low * self.constant, self.floor)
        return inner

    # ---- the result --------------------------------------------------------------------------------------------------
    def scores(self, cone: Cone, learned: Callable[[fx.Node], bool]) -> Scores:
        conditions = folded(self.found.conditions, cone)
        result = Scores(self.constant, self.factors, conditions, self.found.bias, shifts=self.shifts)
        if self.rest is not self.product:
            self.modifier(result)
        if learned(self.product.source) and not learns(result.score):
            raise NotAttention("no gradient reaches its scores")
        if self.gate is not TRUE:
            kind = _wide(self.product.dtype)
            result.score = where(self.gate, result.score or score(kind), 0, kind)
        for part in (result.bias, result.score, *conditions, *self.factors):
            self.refuse_own(part)
        quiet = result.bias is None or is_small(Peeled(bias=result.bias, fills={-1e12}), cone, learned)
        quiet = quiet and stays_finite(result.score, cone, learned)
        result.nan = not (quiet and every_row_sees_a_key(conditions, cone))
        reached = any(learned(each.source) for term in self.terms[: self.outside] for each in loads(term))
        result.stops = result.nan and quiet and not self.hidden_by_sum and not reached
        return result

    def modifier(self, result: Scores) -> None:
        """The function of the score that is left; a constant next to the product is the scale."""
        kind = _wide(self.product.dtype)
        inner, scale = scaled_product(self.rest, self.product)
        term = widened(substitute(self.rest, leaves={inner: score(self.rest.dtype)}), kind)
        for factor in self.scaled():
            term = apply("mul", [term, widened(factor, kind) if isinstance(factor, Term) else factor], kind)
        result.score, result.scale, result.factors = term, scale, []

    def refuse_own(self, part: Term | None) -> None:
        for each in loads(part):
            if self.made_of(each.source):
                raise NotAttention(f"the mask is made of the scores themselves, by {op_name(source_of(each.source))}")


RULES: dict[str, Callable[[Walker, Apply], Term | None]] = {
    "add": Walker.added,
    "sub": Walker.added,
    "mul": Walker.multiplied,
    "div": Walker.divided,
    "neg": Walker.negated,
    "where": Walker.chosen,
    "clamp": Walker.bounded,
    "maximum": Walker.bounded,
    "minimum": Walker.bounded,
}


def source_of(node: fx.Node) -> fx.Node:
    """The call that a tuple's entry comes from."""
    return node.all_input_nodes[0] if op_name(node) == "getitem" else node


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_product(term: Term, product: Load) -> tuple[Term, float]:
    """The product with the constant that stands next to it everywhere in `term`, and that constant."""
    inner: Term = product
    while True:
        users = {each for each in walk(term) if inner in _operands(each)}
        if len(users) != 1 or users == {term}:
            break
        (user,) = users
        if not isinstance(user, Cast):
            break
        inner = user
    users = {each for each in walk(term) if inner in _operands(each)}
    if len(users) == 1:
        (user,) = users
        if isinstance(user, Apply) and user.op in ("mul", "div") and not user.kwargs:
            others = [arg for arg in user.args if arg is not inner]
            value = constant(others[0]) if len(others) == 1 else None
            if value and (user.op == "mul" or user.args[0] is inner):
                return user, float(value) if user.op == "mul" else 1.0 / float(value)
    return inner, 1.0


def _operands(term: Term) -> tuple[Term, ...]:
    if isinstance(term, Cast):
        return (term.operand,)
    return tuple(arg for arg in term.args if isinstance(arg, Term)) if isinstance(term, Apply) else ()
