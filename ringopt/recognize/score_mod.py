"""Questions about a function of the score, a term of `Score`, and the same function in a wider dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.fx as fx

from ringopt.expr.simplify import literal
from ringopt.expr.terms import Apply, Cast, Load, Score, Term, applied, children, constant, converted, score, walk
from ringopt.expr.value_ranges import bounds
from ringopt.recognize.lift import Cone


def learns(score: Term | None) -> bool:
    """Whether a gradient of `score`, a function of the score, reaches the score."""
    pending = [] if score is None else [score]
    while pending:
        term = pending.pop()
        if isinstance(term, Score):
            return True
        if term.dtype.is_floating_point and not (isinstance(term, Apply) and term.op == "detach"):
            pending += children(term)
    return score is None


# Of anything they make no infinity; of finite numbers the others make none.
BOUNDED = frozenset(("tanh", "sigmoid", "erf", "sin", "cos", "atan"))
FINITE = BOUNDED | {"add", "sub", "mul", "neg", "abs", "square", "where", "clamp", "maximum", "minimum", "detach"}
FINITE |= {"relu", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "log_sigmoid"}


def stays_finite(score: Term | None, cone: Cone, learned: Callable[[fx.Node], bool]) -> bool:
    """Whether a function of scores is known to hide no key: to be finite where its score is."""
    found: dict[Term, bool] = {}
    for each in walk(score):
        number = constant(each)
        if number is not None:
            found[each] = math.isfinite(number)
        elif isinstance(each, Load) and each.dtype.is_floating_point and not learned(each.source):
            found[each] = all(map(math.isfinite, bounds(each, cone.spans, cone.known)))
        elif isinstance(each, Apply) and each.dtype.is_floating_point:
            given = [
                found[arg] if isinstance(arg, Term) else arg is None or math.isfinite(float(arg))
                for arg in each.args
                if not isinstance(arg, str)
            ]
            by_number = each.op == "div" and bool(constant(each.args[1]))
            found[each] = each.op in BOUNDED or ((each.op in FINITE or by_number) and all(given))
        else:
            found[each] = all(found[child] for child in children(each))
    return score is None or found[score]


def widened(term: Term, kind: torch.dtype) -> Term:
    """The same with what is made of the score in `kind`: rounding to 16 bits between two ops is not part of a
    function. What is made of coordinates and tensors alone has the bits that the program gives it."""
    new: dict[Term, Term] = {}
    for each in walk(term):
        floating = each.dtype.is_floating_point
        if isinstance(each, Score):
            new[each] = score(kind)
        elif all(new[child] is child for child in children(each)):
            new[each] = each
        elif isinstance(each, Cast):
            operand = new[each.operand]
            new[each] = literal(operand, kind) if floating else converted(operand, each.dtype)
        elif isinstance(each, Apply):
            args = [_of_kind(new[arg], kind) if isinstance(arg, Term) else arg for arg in each.args]
            new[each] = applied(each.op, args, kind if floating else each.dtype, each.kwargs)
    return _of_kind(new[term], kind)


def _of_kind(term: Term, kind: torch.dtype) -> Term:
    return literal(term, kind) if term.dtype.is_floating_point else term
