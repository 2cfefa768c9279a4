"""Constructors that simplify, by laws that hold for every element and bit for bit.

    integer arithmetic on coordinates stays Affine          (k + 3) - q                ->  k - q + 3
    comparisons of coordinates have one normal form         q > k                      ->  k - q <= -1
    a function of one boolean is a choice                   (1 - float(c)) * -1e9      ->  where(c, -0.0, -1e9)
    choices between booleans are logic                      where(c, True, x)          ->  c | x
    negation moves inwards (De Morgan)                      ~(a & ~b)                  ->  ~a | b

Used while a graph is read; `ringopt/expr/terms.py` has the constructors that only intern.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ringopt.expr.terms import (
    INTEGERS,
    Affine,
    Apply,
    Cast,
    Load,
    Plain,
    Score,
    Term,
    affine,
    applied,
    constant,
    converted,
    load,
    number,
    walk,
)
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
OPPOSITE = {"le": "gt", "gt": "le", "ge": "lt", "lt": "ge", "eq": "ne", "ne": "eq"}
MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt", "eq": "eq", "ne": "ne"}

Arg: TypeAlias = "Term | Plain"


def apply(op: str, args: Sequence[Arg], dtype: torch.dtype, kwargs: Sequence[tuple[str, Plain]] = ()) -> Term:
    """A pointwise op of terms, simplified. Operands must already have the dtype that the op computes in."""
    if all(constant(arg) is not None or arg is None for arg in args):
        return _computed(op, args, dtype, kwargs)
    if kwargs:
        return applied(op, args, dtype, kwargs)
    if op in COMPARISONS:
        return compare(op, args[0], args[1])
    if op in ("logical_and", "logical_or", "logical_not"):
        truths = [_as_bool(arg) for arg in args]
        return negate(truths[0]) if op == "logical_not" else logic(op, truths[0], truths[1])
    if op == "where":
        return where(_as_bool(args[0]), args[1], args[2], dtype)
    folded = _affine_op(op, args, dtype) if dtype in INTEGERS else None
    return folded or _choice_op(op, args, dtype) or _neutral(op, args, dtype) or applied(op, args, dtype)


def _computed(op: str, args: Sequence[Arg], dtype: torch.dtype, kwargs: Sequence[tuple[str, Plain]]) -> Term:
    with unset_fake_temporarily(), torch.no_grad():
        tensors = [torch.tensor(constant(arg), dtype=arg.dtype) if isinstance(arg, Term) else arg for arg in args]
        result = getattr(torch.ops.aten, op)(*tensors, **dict(kwargs))  # a plain number, if all arguments are plain
        return number(torch.as_tensor(result).to(dtype).item(), dtype)


def cast(term: Term, dtype: torch.dtype) -> Term:
    """`term.to(dtype)`: choices are converted branch by branch, constants at once; any other dtype to bool is `!=
    0`."""
    if term.dtype == dtype:
        return term
    value = constant(term)
    if value is not None:
        with unset_fake_temporarily():
            return number(torch.tensor(value, dtype=term.dtype).to(dtype).item(), dtype)
    if isinstance(term, Affine) and dtype in INTEGERS:
        return affine(dict(term.steps), term.start, dtype)
    if term.dtype == torch.bool:
        return where(term, 1, 0, dtype)
    if isinstance(term, Apply) and term.op == "where":
        condition, yes, no = (arg for arg in term.args if isinstance(arg, Term))
        return where(condition, cast(yes, dtype), cast(no, dtype), dtype)
    return compare("ne", term, 0) if dtype == torch.bool else converted(term, dtype)


def _as_bool(arg: Arg) -> Term:
    return cast(arg, torch.bool) if isinstance(arg, Term) else number(bool(arg), torch.bool)


# ---- coordinates -----------------------------------------------------------------------------------------------------
def _affine_op(op: str, args: Sequence[Arg], dtype: torch.dtype) -> Term | None:
    terms = [affine({}, arg, dtype) if type(arg) is int else arg for arg in args]
    if not all(isinstance(term, Affine) for term in terms):
        return None
    operands: list[Affine] = terms  # type: ignore[assignment]
    if op in ("add", "sub") and len(operands) == 2:
        return combine(operands[0], 1, operands[1], 1 if op == "add" else -1, dtype)
    if op == "rsub":
        return combine(operands[1], 1, operands[0], -1, dtype)
    if op == "neg":
        return combine(operands[0], -1, affine({}, 0), 0, dtype)
    if op == "mul":
        for term, factor in (operands, operands[::-1]):
            if not factor.steps:
                return combine(term, factor.start, affine({}, 0), 0, dtype)
    return None


def combine(left: Affine, a: int, right: Affine, b: int, dtype: torch.dtype = torch.int64) -> Affine:
    """a * left + b * right."""
    steps = {axis: a * step for axis, step in left.steps}
    for axis, step in right.steps:
        steps[axis] = steps.get(axis, 0) + b * step
    return affine(steps, a * left.start + b * right.start, dtype)


def compare(op: str, left: Arg, right: Arg) -> Term:
    """A comparison in normal form. Of integers only <=, >=, ==, != occur; coordinates stand on the left without a
    constant, with a positive step of k (or of the first axis), and the constant on the right."""
    if constant(left) is not None and (constant(right) is None or not isinstance(left, Term)):
        op, left, right = MIRRORED[op], right, left
    if not isinstance(left, Term):
        return number(COMPARISONS[op](constant(left), constant(right)), torch.bool)
    if constant(left) is not None:
        return _computed(op, [left, right], torch.bool, ())
    found, value = choice(left), constant(right)
    if found is not None and value is not None:
        condition, yes, no = found
        yes, no = (_computed(op, (side, right), torch.bool, ()) for side in (yes, no))
        return where(condition, yes, no, torch.bool)
    if left is right and not left.dtype.is_floating_point and not left.dtype.is_complex:
        return number(op in ("le", "ge", "eq"), torch.bool)
    if isinstance(left, Affine) and (isinstance(right, Affine) or type(right) is int):
        other = right if isinstance(right, Affine) else affine({}, int(right))
        return _compare_coordinates(op, combine(left, 1, other, -1))
    if left.dtype in INTEGERS and type(value) is int:  # of an unsigned dtype, "<= -1" would wrap
        op, value = _only_closed(op, value)
        if isinstance(left, Apply) and left.op == "abs" and isinstance(left.args[0], Affine) and op == "le":
            inner = left.args[0]
            return logic("logical_and", compare("le", inner, value), compare("ge", inner, -value))
        return applied(op, (left, value), torch.bool)
    return applied(op, (left, value if value is not None else right), torch.bool)


def _only_closed(op: str, value: int) -> tuple[str, int]:
    return {"lt": ("le", value - 1), "gt": ("ge", value + 1)}.get(op, (op, value))


def _compare_coordinates(op: str, difference: Affine) -> Term:
    if not difference.steps:
        return number(COMPARISONS[op](difference.start, 0), torch.bool)
    if dict(difference.steps).get("k", difference.steps[0][1]) < 0:
        op, difference = MIRRORED[op], combine(difference, -1, affine({}, 0), 0)
    op, value = _only_closed(op, -difference.start)
    return applied(op, (affine(dict(difference.steps), 0), value), torch.bool)


# ---- choices and logic -----------------------------------------------------------------------------------------------
def choice(term: Any) -> tuple[Term, Term, Term] | None:
    """(condition, value where True, value where False) of a term with two known values; else None."""
    if not isinstance(term, Term) or constant(term) is not None:
        return None
    if isinstance(term, Apply) and term.op == "where" and all(constant(arg) is not None for arg in term.args[1:]):
        return term.args  # type: ignore[return-value]
    if term.dtype == torch.bool:
        return term, number(True, torch.bool), number(False, torch.bool)
    return None


def _choice_op(op: str, args: Sequence[Arg], dtype: torch.dtype) -> Term | None:
    """op(where(c, 1, 0), constants) is where(c, op(1, constants), op(0, constants))."""
    moving = [i for i, arg in enumerate(args) if constant(arg) is None and arg is not None]
    found = choice(args[moving[0]]) if len(moving) == 1 else None
    if found is None:
        return None
    condition, *sides = found
    yes, no = (_computed(op, [*args[: moving[0]], side, *args[moving[0] + 1 :]], dtype, ()) for side in sides)
    return where(condition, yes, no, dtype)


def where(condition: Term, yes: Arg, no: Arg, dtype: torch.dtype) -> Term:
    """`torch.where(condition, yes, no)` in `dtype`; logic, where a branch of a boolean choice is a constant."""
    yes, no = (literal(side, dtype) for side in (yes, no))
    known = constant(condition)
    if known is not None:
        return yes if known else no
    if yes is no:
        return yes
    if dtype == torch.bool:
        for value, op, kept, seen in ((yes, "logical_or", no, True), (no, "logical_and", yes, False)):
            if constant(value) is seen:
                return logic(op, condition, kept)
        for value, op, kept, seen in ((yes, "logical_and", no, False), (no, "logical_or", yes, True)):
            if constant(value) is seen:
                return logic(op, negate(condition), kept)
    return applied("where", (condition, yes, no), dtype)


def literal(arg: Arg, dtype: torch.dtype) -> Term:
    """A number or a term, converted to `dtype`."""
    if isinstance(arg, Term):
        return cast(arg, dtype)
    assert isinstance(arg, (bool, int, float))
    with unset_fake_temporarily():
        return number(
            torch.tensor(arg, dtype=torch.float64 if isinstance(arg, float) else None).to(dtype).item(), dtype
        )


def logic(op: str, left: Term, right: Term) -> Term:
    """The "logical_and" or "logical_or" of two boolean terms."""
    strong = op == "logical_or"  # the value that decides alone
    for one, other in ((left, right), (right, left)):
        if constant(one) is not None:
            return number(strong, torch.bool) if constant(one) is strong else other
    if left is right:
        return left
    return applied(op, (left, right), torch.bool)


def negate(term: Term) -> Term:
    """`~term` of a boolean term, with negation moved inwards."""
    if constant(term) is not None:
        return number(not constant(term), torch.bool)
    if isinstance(term, Apply):
        operands = [arg for arg in term.args if isinstance(arg, Term)]
        if term.op == "logical_not":
            return operands[0]
        if term.op in ("logical_and", "logical_or"):
            other = "logical_or" if term.op == "logical_and" else "logical_and"
            return logic(other, negate(operands[0]), negate(operands[1]))
        # of floats, not (x <= y) is also true where one is nan
        if term.op in OPPOSITE and not any(operand.dtype.is_floating_point for operand in operands):
            return compare(OPPOSITE[term.op], term.args[0], term.args[1])
        if term.op in ("eq", "ne"):
            return applied(OPPOSITE[term.op], term.args, torch.bool)
    return applied("logical_not", (term,), torch.bool)


def _neutral(op: str, args: Sequence[Arg], dtype: torch.dtype) -> Term | None:
    """x for x + (-0.0), x - 0 and x * 1, which are x bit for bit, and for detach(x) where x requires no gradient."""
    first = args[0]
    if op == "detach" and isinstance(first, Term) and not any(map(carries_gradient, walk(first))):
        return first
    if op == "mul" and dtype == torch.bool and len(args) == 2:
        return logic("logical_and", _as_bool(first), _as_bool(args[1]))
    if len(args) != 2 or dtype == torch.bool:
        return None
    sides = [(first, args[1])] if op == "sub" else [(first, args[1]), (args[1], first)]
    whole = not dtype.is_floating_point
    neutral = {"add": "0" if whole else "-0.0", "sub": "0" if whole else "0.0", "mul": "1" if whole else "1.0"}.get(op)
    for kept, other in sides:
        if isinstance(kept, Term) and kept.dtype == dtype and repr(constant(other)) == neutral:
            return kept
    return None


def carries_gradient(term: Term) -> bool:
    """Whether `term` is a leaf that a gradient may reach."""
    return isinstance(term, (Load, Score)) and term.dtype.is_floating_point


# ---- the same term elsewhere -----------------------------------------------------------------------------------------
def substitute(
    term: Term,
    axes: Mapping[str, Term] | None = None,
    sources: Mapping[Any, Any] | None = None,
    leaves: Mapping[Term, Term] | None = None,
) -> Term:
    """The term with coordinates replaced by `axes`, sources renamed by `sources` and leaves replaced by `leaves`,
    simplified again."""
    places, names, others = axes or {}, sources or {}, leaves or {}
    new: dict[Term, Term] = {}
    for each in walk(term):
        if each in others:
            new[each] = others[each]
        elif isinstance(each, Affine):
            new[each] = _moved(each, places)
        elif isinstance(each, Load):
            new[each] = load(names.get(each.source, each.source), [new[index] for index in each.index], each.dtype)
        elif isinstance(each, Cast):
            new[each] = cast(new[each.operand], each.dtype)
        elif isinstance(each, Apply):
            args = [new[arg] if isinstance(arg, Term) else arg for arg in each.args]
            new[each] = apply(each.op, args, each.dtype, each.kwargs)
        else:
            new[each] = each
    return new[term]


def _moved(term: Affine, places: Mapping[str, Term]) -> Term:
    total: Term = affine({}, term.start)
    for axis, step in term.steps:
        place = apply("mul", [places.get(axis, affine({axis: 1}, 0)), step], torch.int64)
        total = apply("add", [total, place], torch.int64)
    return cast(total, term.dtype)
