"""Proves that a candidate is attention: its scores and weights are read element by element.

Every score must be a function of the product of its own query and key, every weight that meets a value the softmax of
its own query and key. What is done on the way becomes a scale, factors, a mask, a bias, sinks, dropout (see
ringopt/recognize/scores.py); anything else is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch.fx as fx
from torch import Tensor

from ringopt.dims.op_families import SAFE_SOFTMAXES
from ringopt.dims.origin import is_constant, is_learned, is_row, origins
from ringopt.expr.simplify import apply, literal, negate, substitute, where
from ringopt.expr.terms import Affine, Apply, Cast, Load, Term, affine, axis, conjuncts, constant, load, loads, score
from ringopt.ir.constants import Constants
from ringopt.ir.nodes import argument, descendants, op_name, shape_of, value_of
from ringopt.ir.symbolic_sizes import is_open, same
from ringopt.recognize.additive_mask import every, folded
from ringopt.recognize.candidates import Candidate, Roles
from ringopt.recognize.lift import Cone, Unreadable
from ringopt.recognize.row_sources import OwnRows, element
from ringopt.recognize.scores import NotAttention, Scores, peel_scores
from ringopt.recognize.softmax import elements_of, is_number, puts_zero, says_seen


@dataclass
class Found:
    """A proved attention.

    sinks      one more logit of every row, a term over b and h, or None
    factors    what the weights are multiplied with after the softmax: of whole rows or whole keys
    dropout_p  of the weights
    original   what is done to the product, as a function of it, where no input reaches that; else None
    known      the tensors that `original` reads
    """

    roles: Roles
    scores: Scores
    sinks: Term | None = None
    factors: list[Term] = field(default_factory=list)
    dropout_p: float = 0.0
    original: Term | None = None
    known: Mapping[fx.Node, Tensor] = field(default_factory=dict)


class Prover:
    """Of the candidates of one graph. Raises NotAttention."""

    def __init__(self, constants: Constants, carries: dict[fx.Node, bool]):
        self.constants, self.learned, self.own_rows = constants, carries.__getitem__, OwnRows(carries)

    def prove(self, candidate: Candidate) -> Found:
        sizes = [size for size in candidate.axes.sizes.values() if is_open(size)]
        try:
            return self.read(candidate)
        except NotAttention:
            if all(map(is_open, sizes)):
                raise
        return self.read(candidate)  # a size that was open has been fixed on the way: all is read with its number

    def read(self, candidate: Candidate) -> Found:
        _check_axes(candidate)
        roles = Roles.of(candidate)
        check_meaning(candidate, roles)
        return Reading(self, candidate, roles).found()


# ---- axes ------------------------------------------------------------------------------------------------------------
def _check_axes(candidate: Candidate) -> None:
    softmax, keys = candidate.softmax, candidate.keys
    where = f"over dim {argument(softmax, 1, 'dim')}"
    if not keys:
        raise NotAttention(f"{where}: it normalises a single number", True)
    if candidate.key_side is None:
        raise NotAttention(f"{where}: its axis is none that one operand alone brings to the product below", True)
    if sorted(candidate.summed) != sorted(keys):
        raise NotAttention(f"{where}: the values are summed over other axes than the softmax normalises", True)
    values = candidate.values
    met = prod(size for letter, size in values.sizes().items() if letter in values.contracted)
    if not same(met, candidate.axes.size(keys)):
        raise NotAttention(f"{where}: {met} weights meet values, of {candidate.axes.size(keys)} keys")


def check_meaning(candidate: Candidate, roles: Roles) -> None:
    """Whether the axis of the keys is a sequence. A look-alike may compute the same as attention; to shard it as if its
    features or experts were tokens would be no use."""
    scores, key_side = candidate.scores, candidate.key_side
    assert key_side is not None
    key, query = scores.operands[key_side], scores.operands[1 - key_side]
    if is_learned(key) or is_learned(candidate.value):
        raise NotAttention("its keys or values are parameters: a router or a memory, not a sequence", True)
    if is_constant(key) and (not roles.batch or not roles.queried or is_constant(candidate.value)):
        raise NotAttention("its keys are constants of the program: a router or a memory, not a sequence", True)
    dim = next(
        dim
        for dim, letter in enumerate(scores.letters[key_side])
        if letter and candidate.axes.whole((letter,)) == candidate.keys
    )
    above = origins(key, dim)
    if any(origin.kind == "features" for origin in above) and not any(map(is_row, above)):
        raise NotAttention("the softmax runs over features: channel attention, not over a sequence", True)
    if not roles.queried and is_learned(query):
        raise NotAttention("no axis of queries: the scores are mixed by a parameter", True)
    if batchless(candidate, roles):
        raise NotAttention("every element of the batch has the same keys: a router or a memory, not a sequence", True)
    value_dim = next(
        dim
        for dim, letter in enumerate(candidate.values.letters[1 - candidate.side])
        if letter in candidate.values.contracted
    )
    inputs = [*above, *origins(candidate.value, value_dim)]
    if all(origin.kind == "input" and not is_row(origin) for origin in inputs):
        raise NotAttention("the softmax runs over the last dim of its inputs: over features, not over a sequence", True)


def batchless(candidate: Candidate, roles: Roles) -> bool:
    """Queries with a batch, keys without: more than the queries and one axis of heads belong to Q alone."""
    return not roles.batch and len(roles.groups) > 1


# ---- elements --------------------------------------------------------------------------------------------------------
class Reading:
    """Terms are read over the axes of the candidate, then rewritten over b, h, q, k."""

    def __init__(self, prover: Prover, candidate: Candidate, roles: Roles):
        self.prover, self.candidate, self.roles, self.learned = prover, candidate, roles, prover.learned
        axes, product = candidate.axes, candidate.scores
        self.names = self.cone_names()
        sizes = {self.names[name]: axes.sizes[name] for group in roles.canonical.values() for name in group}
        queries, keys = (frozenset(self.names[name] for name in group) for group in (roles.queries, roles.keys))
        dropouts = [node for node in candidate.dims if op_name(node) == "dropout"]
        self.stops = {product.node, candidate.softmax, *dropouts}
        self.below = descendants(product.node, candidate.values.node)
        self.cone = Cone(prover.constants, sizes, queries, keys, self.stops)
        self.canonical = Cone(prover.constants, roles.sizes)
        self.canonical.known = self.cone.known
        self.offset = 0
        self.zeroed = False
        self.original: Term | None = None
        self.kept: list[Term] = []
        self.kept_pairs: list[Term] = []
        self.zeros: list[Term] = []

    def cone_names(self) -> dict[str, str]:
        """The only axis of the queries is called q, as masks know it; so with the keys, batch and heads."""
        names = {name: f"{name}'" for group in self.roles.canonical.values() for name in group}
        for role, group in self.roles.canonical.items():
            if len(group) == 1:
                names[group[0]] = role
        return names

    def found(self) -> Found:
        factors, dropout_p = self.weights()
        scores, sinks = self.scores()
        factors += self.zeros
        found = Found(self.roles, scores, sinks, factors, dropout_p, self.original, self.cone.known)
        if self.zeroed or op_name(self.candidate.softmax) in SAFE_SOFTMAXES:
            scores.nan = False
        return found

    # ---- indices ---------------------------------------------------------------------------------------------------
    def index(self, dims: Sequence[Sequence[str]]) -> tuple[Term, ...]:
        """The place of an element whose dims run along the given axes."""
        return tuple(self.place(dim) for dim in dims)

    def place(self, dim: Sequence[str]) -> Affine:
        axes, step = self.candidate.axes, 1
        steps: dict[str, int] = {}
        for name in reversed(axes.whole(dim)):
            steps[self.names[name]] = step
            step *= axes.sizes[name]
        return affine(steps, 0)

    def over_bhqk(self, term: Term) -> Term:
        places: dict[str, Term] = {}
        for role, group in self.roles.canonical.items():
            step = self.candidate.axes.size(group)
            for name in group:
                size = self.candidate.axes.sizes[name]
                step //= size
                place: Term = axis(role)
                if step > 1:
                    place = apply("floor_divide", [place, step], place.dtype)
                if name != group[0]:
                    place = apply("remainder", [place, size], place.dtype)
                places[self.names[name]] = place
        return substitute(term, places)

    def at(self, node: fx.Node, index: Sequence[Term]) -> Term:
        """An element. A tensor over pairs that cannot be read is taken as it is, a row at a time."""
        try:
            return element(self.cone, node, index, self.below)
        except Unreadable as problem:
            raise NotAttention(problem.refusal.sentence, problem.refusal.node in self.below) from problem

    @property
    def tables(self) -> list[fx.Node]:
        return [node for node in self.cone.stops if node not in self.stops]

    # ---- scores ------------------------------------------------------------------------------------------------------
    def scores(self) -> tuple[Scores, Term | None]:
        candidate, product = self.candidate, self.candidate.scores
        softmax, given = candidate.softmax, candidate.softmax.args[0]
        dim = argument(softmax, 1, "dim") % len(shape_of(softmax))
        place = list(self.index(candidate.dims[softmax]))
        place[dim] = apply("add", [place[dim], self.offset], place[dim].dtype)
        term = self.at(given, place)
        expected = load(
            product.node, self.index([(x,) if x else () for x in product.out]), value_of(product.node).dtype
        )
        for each in loads(term):
            if each.source is product.node and each is not expected:
                raise NotAttention("a score is made of other products than that of its own query and key")
        if expected not in loads(term):
            raise NotAttention("the scores do not depend on their product")
        over = self.over_bhqk(self.own_rows(term))
        main = next(each for each in loads(over) if each.source is product.node)
        original = substitute(over, leaves={main: score(main.dtype)})
        self.original = original if self.canonical.is_known(original) else None
        scores = self.peeled(over, main)
        return scores, self.sinks(given, place, dim, scores)

    def peeled(self, term: Term, product: Load) -> Scores:
        """Where weights are put to 0 under another mask than that of the scores, but for whole rows or keys, a factor
        does it: of weights that are numbers, for 0 * NaN is not 0."""
        peel = partial(peel_scores, term, product, self.canonical, self.learned, self.below.__contains__)
        if not self.kept:
            return peel()
        kept, pairs = (
            folded([self.over_bhqk(each) for each in part], self.canonical) for part in (self.kept, self.kept_pairs)
        )
        try:
            return peel(pairs)
        except NotAttention:
            zeros = self.zeros_of(kept)
            scores = peel() if zeros is not None else None
            if scores is None or zeros is None or scores.nan:
                raise
        self.zeros = zeros
        return scores

    def zeros_of(self, kept: Sequence[Term]) -> list[Term] | None:
        """Factors, of whole rows and of whole keys, that are 0 where not all of `kept` hold; None where these tell
        pairs apart, or heads of a key."""
        keys = [each for each in kept if "k" in each.axes]
        rows = [each for each in kept if "k" not in each.axes]
        pairs = any(each.axes - {"b", "k"} for each in keys) or any(each.axes - {"b", "h", "q"} for each in rows)
        if pairs or any(each.source in self.below for each in loads(*kept)):
            return None
        kind = value_of(self.candidate.softmax).dtype
        return [where(every(part), 1, 0, kind) for part in (rows, keys) if part]

    def sinks(self, given: fx.Node, place: list[Term], dim: int, scores: Scores) -> Term | None:
        """The columns of the softmax that no key has: one logit of every row, the same for all queries of a head."""
        extra = shape_of(given)[dim] - self.candidate.axes.size(self.candidate.keys)
        if not extra:
            return None
        if extra > 1:
            raise NotAttention(f"{extra} extra logits beside the keys; one is understood")
        column = affine({}, 0 if self.offset else shape_of(given)[dim] - 1)
        term = self.over_bhqk(self.at(given, [*place[:dim], column, *place[dim + 1 :]]))
        bare = without(term, scores.shifts)
        if bare is None:
            raise NotAttention("what is taken off all scores of a row is not taken off the extra logit beside them")
        term = bare
        if term.axes - {"b", "h"} or any(each.source in self.below for each in loads(term)):
            raise NotAttention("the extra logit beside the keys is not one number a head")
        return term

    def own_rows(self, term: Term) -> Term:
        try:
            return self.prover.own_rows.of(term, self.tables, self.cone)
        except Unreadable as problem:
            raise NotAttention(problem.refusal.sentence) from problem

    # ---- weights -----------------------------------------------------------------------------------------------------
    def weights(self) -> tuple[list[Term], float]:
        """What the weights go through before they meet the values: factors, and how many are dropped."""
        candidate = self.candidate
        factors: list[Term] = []
        dropout_p = 0.0
        term = self.at(candidate.weights, self.index(candidate.dims[candidate.weights]))
        while not (isinstance(term, Load) and term.source is candidate.softmax):
            if isinstance(term, Load) and op_name(term.source) == "dropout" and not dropout_p:
                dropout_p = float(argument(term.source, 1, "p"))
                term = self.at(term.source.args[0], term.index)
            elif isinstance(term, Cast) and term.operand.dtype.is_floating_point:
                term = term.operand
            else:
                term = self.inner(term, factors)
        self.check_weight(term)
        factors = [self.over_bhqk(factor) for factor in factors]
        if any({"h", "k"} <= factor.axes for factor in factors):
            raise NotAttention("the weights of each key are multiplied by a factor of its head after the softmax")
        return factors, dropout_p

    def inner(self, term: Term, factors: list[Term]) -> Term:
        """The weight below a factor, or below what puts 0 for NaN."""
        below: Term | None = None
        if isinstance(term, Apply) and puts_zero(term) and self.has_weight(term.args[0]):
            below, self.zeroed = literal(term.args[0], term.dtype), True
        elif isinstance(term, Apply) and term.op == "where":
            below = self.unhidden(term)
        elif isinstance(term, Apply) and term.op in ("mul", "div") and not term.kwargs:
            below = self.unscaled(term, factors)
        if below is None:
            raise NotAttention("the weights are changed after the softmax, by more than a factor of whole rows or keys")
        return below

    def has_weight(self, arg: object) -> bool:
        sources = {each.source for each in loads(arg)} if isinstance(arg, Term) else set()
        return any(source in self.stops and source is not self.candidate.scores.node for source in sources)

    def unhidden(self, term: Apply) -> Term | None:
        """The weight of where(c, weight, 0): c tells numbers from NaN, rows with keys from others, or is the mask."""
        condition, yes, no = (arg for arg in term.args if isinstance(arg, Term))
        holds, weight, other = (condition, yes, no) if self.has_weight(yes) else (negate(condition), no, yes)
        if constant(other) != 0 or self.has_weight(holds) != is_number(holds, weight):
            return None
        if not is_number(holds, weight) and (pairs := self.of_pairs(holds)):
            self.kept += conjuncts(holds)
            self.kept_pairs += conjuncts(pairs)
        self.zeroed = True
        return weight

    def of_pairs(self, holds: Term) -> Term | None:
        """What `holds` asks of a weight. Of `any` over the keys this is what it asks of one of them: in a row with keys
        the weights of others are 0 already. None where that is whether any score is above -inf."""
        found = elements_of(holds)
        if found is None:
            return holds
        row, truth, dim, kept = found
        softmax, elements = self.candidate.softmax, row.source.args[0]
        own = self.index(self.candidate.dims[softmax])
        along = argument(softmax, 1, "dim") % len(own)
        of_keys = any(each.axes & own[along].axes for each in row.index)  # and then not of rows
        if of_keys or not same(shape_of(elements)[dim], shape_of(softmax)[along]):
            return holds
        index = (*row.index[:dim], own[along], *row.index[dim + kept :])
        if index == own and says_seen(elements, softmax.args[0]) is truth:
            return None
        term = self.at(elements, index)
        return term if truth else negate(term)

    def unscaled(self, term: Apply, factors: list[Term]) -> Term | None:
        """The weight of a product or quotient; the factor is noted."""
        weight, other = term.args if self.has_weight(term.args[0]) else term.args[::-1]
        if not isinstance(weight, Term) or self.has_weight(other) or (term.op == "div" and weight is not term.args[0]):
            return None
        factor = literal(other, term.dtype)
        if self.is_over_pairs(factor) or any(each.source in self.below for each in loads(factor)):
            return None
        if self.zeroed and loads(factor):
            return None  # where the factor is no number, the product is made 0 behind it
        factors.append(factor if term.op == "mul" else apply("reciprocal", [factor], factor.dtype))
        return weight

    def is_over_pairs(self, term: Term) -> bool:
        return bool(term.axes & self.cone.rows and term.axes & self.cone.keys)

    def check_weight(self, term: Load) -> None:
        """The weight must be that of its own query and key; sinks stand before or behind the keys."""
        candidate = self.candidate
        softmax = candidate.softmax
        dim = argument(softmax, 1, "dim") % len(shape_of(softmax))
        expected = self.index(candidate.dims[softmax])
        extra = shape_of(softmax)[dim] - candidate.axes.size(candidate.keys)
        for self.offset in range(extra + 1):
            shifted = apply("add", [expected[dim], self.offset], expected[dim].dtype)
            if term.index == (*expected[:dim], shifted, *expected[dim + 1 :]):
                return
        raise NotAttention("the weight that a value is multiplied with is not that of its own query and key")


def without(term: Term, shifts: Sequence[Term]) -> Term | None:
    """`term` without what was added to the whole row; None where some of that was not added to it."""
    pending = list(shifts)
    while pending and isinstance(term, Apply) and term.op in ("sub", "add") and len(term.args) == 2:
        left, right = term.args
        shift = apply("neg", [right], term.dtype) if term.op == "sub" and isinstance(right, Term) else right
        if not isinstance(left, Term) or not any(shift is each for each in pending):
            break
        pending = [each for each in pending if each is not shift]
        term = left
    return None if pending else term
