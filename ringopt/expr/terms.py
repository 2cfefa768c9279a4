"""A mask as an expression: the value of one element, for batch b, query head h, query position q and key position k.

    Affine   start + sum of step * axis    integer arithmetic on coordinates; an integer constant has no steps
    Number   a constant of another dtype
    Load     one element of a small tensor
    Score    the scaled product of the query and the key
    Cast     another dtype
    Apply    a pointwise ATen op

Nothing of the mask's size exists until a reader (ringopt/expr/evaluate.py, value_ranges.py) asks for a block. Terms
are interned: equal terms are one object, so `is` proves that a query and a key are looked up in the same vector.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import torch

INTEGERS = (torch.int64, torch.int32)

Plain: TypeAlias = "int | float | bool | str | None"


@dataclass(frozen=True, eq=False)
class Term:
    """dtype of the element, and the axes it depends on."""

    dtype: torch.dtype
    axes: frozenset[str]


@dataclass(frozen=True, eq=False)
class Affine(Term):
    """An integer that is linear in the coordinates: `start + sum(step * axis)`."""

    steps: tuple[tuple[str, int], ...]  # (axis, step), sorted, no zero step
    start: int


@dataclass(frozen=True, eq=False)
class Number(Term):
    """A constant of a dtype other than INTEGERS."""

    value: int | float | bool


@dataclass(frozen=True, eq=False)
class Load(Term):
    """`source[index]`. The source is an fx.Node while a graph is read, later an index into a mask's list of tensors."""

    source: Any
    index: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class Score(Term):
    """The scaled product of query and key, the argument of a score modifier; one term a dtype."""


@dataclass(frozen=True, eq=False)
class Cast(Term):
    """`operand.to(dtype)`."""

    operand: Term


@dataclass(frozen=True, eq=False)
class Apply(Term):
    """`torch.ops.aten.<op>(*args, **kwargs)`; the overload follows from the arguments."""

    op: str
    args: tuple[Term | Plain, ...]
    kwargs: tuple[tuple[str, Plain], ...]


T = TypeVar("T", bound=Term)

_made: WeakValueDictionary[tuple[Any, ...], Term] = WeakValueDictionary()
_lock = threading.Lock()


def _intern(key: tuple[Any, ...], make: Callable[[], T]) -> T:
    with _lock:
        found = _made.get(key)
        if found is None:
            found = _made[key] = make()
    return cast(T, found)


# ---- constructors, which only intern; simplify.py has those that simplify ----------------------------------------
def affine(steps: Mapping[str, int], start: int, dtype: torch.dtype = torch.int64) -> Affine:
    """An Affine with its steps in normal form. Symbolic sizes become ints, which specialises them."""
    kept = tuple(sorted((axis, int(step)) for axis, step in steps.items() if step))
    start = int(start)  # a term holds no symbolic sizes: int() specialises them
    axes = frozenset(axis for axis, _ in kept)
    return _intern((Affine, dtype, kept, start), lambda: Affine(dtype, axes, kept, start))


def axis(name: str) -> Affine:
    """The coordinate along the axis `name`: one of b, h, q, k, r."""
    return affine({name: 1}, 0)


def number(value: int | float | bool, dtype: torch.dtype) -> Term:
    """A constant that `dtype` holds exactly."""
    if dtype in INTEGERS:
        return affine({}, int(value), dtype)
    # repr tells -0.0 from 0.0 and finds nan again
    return _intern((Number, dtype, repr(value)), lambda: Number(dtype, frozenset(), value))


def load(source: Any, index: Sequence[Term], dtype: torch.dtype) -> Load:
    """`source[index]`, of the dtype of the source."""
    places = tuple(index)
    return _intern((Load, dtype, source, places), lambda: Load(dtype, axes_of(places), source, places))


def score(dtype: torch.dtype) -> Score:
    """The scaled score in `dtype`."""
    return _intern((Score, dtype), lambda: Score(dtype, frozenset("bhqk")))


def converted(operand: Term, dtype: torch.dtype) -> Cast:
    """A Cast, without simplification."""
    return _intern((Cast, dtype, operand), lambda: Cast(dtype, operand.axes, operand))


def applied(
    op: str, args: Sequence[Term | Plain], dtype: torch.dtype, kwargs: Sequence[tuple[str, Plain]] = ()
) -> Apply:
    """An Apply, without simplification; symbolic sizes among `args` become ints."""
    given = tuple(int(arg) if isinstance(arg, torch.SymInt) else arg for arg in args)
    named = tuple(kwargs)
    key = (Apply, dtype, op, tuple(arg if isinstance(arg, Term) else repr(arg) for arg in given), repr(named))
    return _intern(key, lambda: Apply(dtype, axes_of(given), op, given, named))


def axes_of(args: Sequence[Any]) -> frozenset[str]:
    """The union of the axes of the terms among `args`."""
    return frozenset().union(*(arg.axes for arg in args if isinstance(arg, Term)))


# ---- small questions -------------------------------------------------------------------------------------------------
def constant(term: Any) -> int | float | bool | None:
    """The number that a term (or a plain argument) always is, or None."""
    if isinstance(term, (bool, int, float)):
        return term
    if isinstance(term, Affine) and not term.steps:
        return term.start
    return term.value if isinstance(term, Number) else None


def conjuncts(term: Term) -> list[Term]:
    """The conditions that `term` is the conjunction of; none for True."""
    if isinstance(term, Apply) and term.op == "logical_and":
        return [each for arg in term.args if isinstance(arg, Term) for each in conjuncts(arg)]
    return [] if constant(term) is True else [term]


def children(term: Term) -> tuple[Term, ...]:
    """The operands of a term that are terms."""
    if isinstance(term, Load):
        return term.index
    if isinstance(term, Cast):
        return (term.operand,)
    if isinstance(term, Apply):
        return tuple(arg for arg in term.args if isinstance(arg, Term))
    return ()


def walk(*terms: Term | None) -> Iterator[Term]:
    """Every subterm once, in topological order: operands first."""
    seen: set[Term] = set()
    stack = [(term, False) for term in reversed(terms) if term is not None]
    while stack:
        term, ready = stack.pop()
        if ready:
            yield term
        elif term not in seen:
            seen.add(term)
            stack.append((term, True))
            stack.extend((child, False) for child in reversed(children(term)))


def loads(*terms: Term | None) -> list[Load]:
    """Every Load among the subterms, once."""
    return [term for term in walk(*terms) if isinstance(term, Load)]


# ---- JSON ------------------------------------------------------------------------------------------------------------
def dumps(*terms: Term) -> list[Any]:
    """A JSON value: every subterm of `terms` once, operands first, and last the indices of `terms` in that list.

    ["affine", dtype, {axis: step}, start], ["number", dtype, value], ["load", dtype, source, [operand, ...]],
    ["score", dtype], ["cast", dtype, operand], ["op", dtype, name, args, kwargs]: operands are indices into the list; a
    term among `args` is [index], other arguments stand for themselves. Raises TypeError where a source is no number.
    """
    order = list(walk(*terms))
    place = {term: i for i, term in enumerate(order)}
    return [*(_dump(term, place) for term in order), [place[term] for term in terms]]


def _dump(term: Term, place: Mapping[Term, int]) -> list[Any]:
    dtype = str(term.dtype).removeprefix("torch.")
    if isinstance(term, Affine):
        return ["affine", dtype, dict(term.steps), term.start]
    if isinstance(term, Number):
        return ["number", dtype, _plain(term.value)]
    if isinstance(term, Load):
        if not isinstance(term.source, int):
            raise TypeError(f"{term.source!r}: a source is written as its number in a list of tensors")
        return ["load", dtype, term.source, [place[index] for index in term.index]]
    if isinstance(term, Score):
        return ["score", dtype]
    if isinstance(term, Cast):
        return ["cast", dtype, place[term.operand]]
    assert isinstance(term, Apply)
    args = [[place[arg]] if isinstance(arg, Term) else _plain(arg) for arg in term.args]
    return ["op", dtype, term.op, args, {name: _plain(value) for name, value in term.kwargs}]


def loads_terms(data: Sequence[Any]) -> tuple[Term, ...]:
    """The terms that `dumps` wrote. Runs no tensor operation: it may be called while a graph is being traced."""
    made: list[Term] = []
    for kind, name, *rest in data[:-1]:
        dtype = getattr(torch, name)
        if kind == "affine":
            made.append(affine(rest[0], rest[1], dtype))
        elif kind == "number":
            made.append(number(_number(rest[0]), dtype))
        elif kind == "load":
            made.append(load(rest[0], [made[i] for i in rest[1]], dtype))
        elif kind == "score":
            made.append(score(dtype))
        elif kind == "cast":
            made.append(converted(made[rest[0]], dtype))
        elif kind == "op":
            args = [made[arg[0]] if isinstance(arg, list) else _number(arg) for arg in rest[1]]
            made.append(applied(rest[0], args, dtype, [(key, _number(value)) for key, value in rest[2].items()]))
        else:
            raise ValueError(f"a term of kind {kind!r} is not known")
    return tuple(made[i] for i in data[-1])


def _plain(value: Any) -> Any:
    """JSON has no inf and no nan."""
    return {"float": repr(value)} if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    return float(value["float"]) if isinstance(value, dict) else value
