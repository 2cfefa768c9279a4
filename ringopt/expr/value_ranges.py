"""An interval that holds every element of a block, from intervals of its operands (interval arithmetic, Moore 1966).

Sound, not tight: never narrower than the values, and unbounded where an op has no rule. So a block that is called empty
or full is so, while some empty or full blocks are not recognised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ringopt.expr.evaluate import Sources, evaluate
from ringopt.expr.terms import Affine, Apply, Cast, Load, Score, Term, constant, loads, walk

Interval = tuple[Any, Any]

EITHER: Interval = (False, True)
ANYTHING: Interval = (-math.inf, math.inf)  # NaN included

# The most elements that are read to bound one Load; a larger one is unbounded.
MOST_READ = 1 << 20
AT_ONCE = 1 << 16  # of these


def bounds(
    term: Term,
    spans: Mapping[str, range],
    sources: Sources,
    assumed: Callable[[Load], Interval | None] = lambda load: None,
) -> Interval:
    """(lowest, highest) over `spans` (axis -> nonempty range of ascending coordinates).

    Tensors in `sources` are read, no more than a block of each; a Load of any other source is unbounded.
    `assumed` may give the interval of a Load instead.
    """
    found: dict[Term, Interval] = {}
    for each in walk(term):
        if constant(each) is not None:
            found[each] = (constant(each), constant(each))
        elif isinstance(each, Affine):
            ends = [(step * spans[axis][0], step * spans[axis][-1]) for axis, step in each.steps]
            found[each] = (each.start + sum(map(min, ends)), each.start + sum(map(max, ends)))
        elif isinstance(each, Load):
            found[each] = assumed(each) or _of_load(each, spans, sources)
        elif isinstance(each, Score):
            found[each] = ANYTHING
        elif isinstance(each, Cast):
            found[each] = _cast(found[each.operand], each.operand.dtype, each.dtype)
        elif isinstance(each, Apply):
            found[each] = _of_apply(each, found)
        found[each] = _held(found[each], each.dtype)
    return found[term]


def _unknown(dtype: torch.dtype) -> Interval:
    if dtype.is_floating_point or dtype.is_complex:
        return ANYTHING
    return EITHER if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _of_load(term: Load, spans: Mapping[str, range], sources: Sources) -> Interval:
    source = sources.get(term.source) if isinstance(sources, Mapping) else sources[term.source]
    axes = sorted(term.axes)
    if isinstance(sources, Mapping) and any(each.source not in sources for each in loads(*term.index)):
        return _unknown(term.dtype)
    if source is None or math.prod(len(spans[axis]) for axis in axes) > MOST_READ:
        return _unknown(term.dtype)
    found = [_of_piece(term, piece, sources, source.device) for piece in _pieces({axis: spans[axis] for axis in axes})]
    if ANYTHING in found:
        return ANYTHING
    return min(low for low, _ in found), max(high for _, high in found)


def _pieces(spans: Mapping[str, range]) -> Iterator[dict[str, range]]:
    """Blocks of few elements, cut along the longest axis."""
    if not spans:
        yield {}
        return
    longest = max(spans, key=lambda axis: len(spans[axis]))
    others = math.prod(len(span) for axis, span in spans.items() if axis != longest)
    step = max(1, AT_ONCE // others)
    for start in range(0, len(spans[longest]), step):
        yield {**spans, longest: spans[longest][start : start + step]}


def _of_piece(term: Load, spans: Mapping[str, range], sources: Sources, device: torch.device) -> Interval:
    place = {}
    for dim, (axis, span) in enumerate(spans.items()):
        rows = torch.arange(span.start, span.stop, span.step, device=device)
        place[axis] = rows.view([-1 if other == dim else 1 for other in range(len(spans))])
    values = evaluate(term, place, sources, device).detach()
    if values.is_floating_point() and bool(values.isnan().any()):
        return ANYTHING
    if values.dtype == torch.bool:
        return bool(values.all()), bool(values.any())
    return values.min().item(), values.max().item()


def _of_apply(term: Apply, found: Mapping[Term, Interval]) -> Interval:
    args = [found[arg] if isinstance(arg, Term) else (arg, arg) for arg in term.args]
    rule = RULES.get(term.op)
    may_be_nan = ANYTHING in args and term.op != "where"
    return _unknown(term.dtype) if rule is None or term.kwargs or may_be_nan else rule(*args)


def _held(interval: Interval, dtype: torch.dtype) -> Interval:
    """The interval rounded to `dtype`: rounding is monotone, so rounding the ends is enough; integers may wrap."""
    low, high = interval
    if dtype == torch.bool:
        return bool(low), bool(high)
    if dtype.is_complex or math.isnan(low) or math.isnan(high):
        return _unknown(dtype)
    if dtype.is_floating_point:
        ends = torch.tensor([low, high], dtype=torch.float64)
        ends = (ends.float() if dtype.itemsize == 2 else ends).to(dtype)  # 16 bits: computed in float32, then rounded
        return ends[0].item(), ends[1].item()
    most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    return (low, high) if least <= low and high <= most else (least, most)


def _cast(interval: Interval, old: torch.dtype, new: torch.dtype) -> Interval:
    low, high = interval
    if interval == ANYTHING and new != torch.bool:
        return _unknown(new)
    if new == torch.bool:
        return _known(low > 0 or high < 0, low == high == 0)
    if old.is_floating_point and not new.is_floating_point:
        return (math.trunc(low), math.trunc(high)) if math.isfinite(low) and math.isfinite(high) else _unknown(new)
    return low, high


def _known(always: bool, never: bool) -> Interval:
    return (True, True) if always else (False, False) if never else EITHER


def _plus(a: Interval, b: Interval) -> Interval:
    low, high = a[0] + b[0], a[1] + b[1]
    return ANYTHING if math.isnan(low) or math.isnan(high) else (low, high)


def _minus(a: Interval) -> Interval:
    return -a[1], -a[0]


def _times(a: Interval, b: Interval) -> Interval:
    if not all(map(math.isfinite, (*a, *b))):
        return ANYTHING  # 0 * inf
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


def _divided(a: Interval, b: Interval) -> Interval:
    if b[0] <= 0 <= b[1] or not all(map(math.isfinite, (*a, *b))):
        return ANYTHING
    ends = [x / y for x in a for y in b]
    return min(ends), max(ends)


def _abs(a: Interval) -> Interval:
    return (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))), max(abs(a[0]), abs(a[1]))


def _where(c: Interval, x: Interval, y: Interval) -> Interval:
    return x if c[0] else y if not c[1] else (min(x[0], y[0]), max(x[1], y[1]))


def _floor_divide(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not isinstance(b[0], int) or b[0] <= 0 or not (isinstance(a[0], int) and isinstance(a[1], int)):
        return ANYTHING
    return a[0] // b[0], a[1] // b[0]


def _remainder(a: Interval, b: Interval) -> Interval:
    if b[0] != b[1] or not isinstance(b[0], int) or b[0] <= 0 or not (isinstance(a[0], int) and isinstance(a[1], int)):
        return ANYTHING
    if a[0] // b[0] == a[1] // b[0]:
        return a[0] % b[0], a[1] % b[0]
    return 0, b[0] - 1


def _clamp(x: Interval, low: Interval = (None, None), high: Interval = (None, None)) -> Interval:
    if low[0] is not None:
        x = max(x[0], low[0]), max(x[1], low[1])
    if high[0] is not None:
        x = min(x[0], high[0]), min(x[1], high[1])
    return x


COMPARISONS: dict[str, Callable[[Interval, Interval], Interval]] = {
    "le": lambda a, b: _known(a[1] <= b[0], a[0] > b[1]),
    "lt": lambda a, b: _known(a[1] < b[0], a[0] >= b[1]),
    "ge": lambda a, b: _known(a[0] >= b[1], a[1] < b[0]),
    "gt": lambda a, b: _known(a[0] > b[1], a[1] <= b[0]),
    "eq": lambda a, b: _known(a[0] == a[1] == b[0] == b[1], a[1] < b[0] or b[1] < a[0]),
    "ne": lambda a, b: _known(a[1] < b[0] or b[1] < a[0], a[0] == a[1] == b[0] == b[1]),
}

RULES: dict[str, Callable[..., Interval]] = {
    **COMPARISONS,
    "logical_and": lambda a, b: (a[0] and b[0], a[1] and b[1]),
    "logical_or": lambda a, b: (a[0] or b[0], a[1] or b[1]),
    "logical_not": lambda a: (not a[1], not a[0]),
    "add": _plus,
    "sub": lambda a, b: _plus(a, _minus(b)),
    "rsub": lambda a, b: _plus(b, _minus(a)),
    "neg": _minus,
    "mul": _times,
    "div": _divided,
    "abs": _abs,
    "where": _where,
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "clamp": _clamp,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "detach": lambda a: a,
}
