"""Conditions as the structural pattern of an attention, which a plan can use.

Bands of k - q, of all keys or of every d-th (dilated windows), a prefix of keys that all queries see, a window with
attention sinks, chunks, and, where the values are known at compile time, packed sequences and lists of blocks. A
pattern replaces conditions only where it hides what they hide and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ringopt.expr.block_sparse import block_list
from ringopt.expr.terms import Affine, Apply, Load, Term, axes_of, conjuncts, constant, number
from ringopt.torch_compat.fake_tensors import unset_fake_temporarily

# The steps of k - q and of q - k
DIFFERENCE = (("k", 1), ("q", -1))
OPPOSITE = (("k", -1), ("q", 1))
ANY, CAUSAL = (-math.inf, math.inf), (-math.inf, 0)

# Packed sequences at most: their boundaries are part of the graph's text.
MOST_DOCUMENTS = 1024


def band_of(condition: Any) -> tuple[float, float] | None:
    """(low, high) of a condition low <= k - q <= high; None for any other."""
    if not isinstance(condition, Apply) or condition.op not in ("le", "ge", "eq"):
        return None
    left, right = condition.args
    if not isinstance(left, Affine) or left.steps != DIFFERENCE or not isinstance(right, int):
        return None
    return (-math.inf if condition.op == "le" else right, math.inf if condition.op == "ge" else right)


def rate_of(condition: Any) -> int:
    """d where the condition is that k - q is a multiple of d, in any spelling; else 0."""
    if not isinstance(condition, Apply) or condition.op != "eq":
        return 0
    left, right = condition.args
    rests = [found for side in (left, right) if (found := remainder_of(side)) is not None]
    if len(rests) == 1 and right == 0:  # (q - k) % d == 0
        ((steps, rate),) = rests
        return rate if steps in (DIFFERENCE, OPPOSITE) else 0
    if len(rests) == 2 and rests[0][1] == rests[1][1]:  # q % d == k % d
        return rests[0][1] if {steps for steps, _ in rests} == {(("k", 1),), (("q", 1),)} else 0
    return 0


def remainder_of(term: Any) -> tuple[tuple[tuple[str, int], ...], int] | None:
    """(steps of x, d) of x % d, or of abs(x) % d, whose zeros are the same."""
    if not isinstance(term, Apply) or term.op != "remainder" or not isinstance(term.args[1], int):
        return None
    place, rate = term.args[0], term.args[1]
    if isinstance(place, Apply) and place.op == "abs":
        place = place.args[0]
    if not isinstance(place, Affine) or place.start != 0 or rate < 1:
        return None
    return place.steps, rate


@dataclass(frozen=True)
class Known:
    """What is known at compile time: values of sources that depend on no input, and the lengths of the axes (symbolic
    ones included)."""

    tensors: Mapping[Any, Tensor] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def rows(self, source: Any) -> Tensor | None:
        """The values of a vector with one entry a token, of queries and keys alike; None for any other source."""
        values, sizes = self.tensors.get(source), [self.sizes.get(side) for side in "qk"]
        fits = values is not None and all(isinstance(n, int) and [n] == list(values.shape) for n in sizes)
        return values if fits else None


def split(conditions: Sequence[Term], known: Known | None = None) -> tuple[str, list[Term]]:
    """The pattern, and the conditions that it does not express. Together they hide what `conditions` hide.

    Where no pattern expresses the conditions on k - q exactly, or those whose values are known, the narrowest pattern
    around them is taken and they stay.
    """
    low, high, rate, rest = stretch_of(conditions)
    if low > high or any(constant(condition) is False for condition in conditions):
        return "full", [number(False, torch.bool)]
    if (low, high) in (ANY, CAUSAL) and rate == 1:
        for condition in rest:
            if pattern := structure(condition, (low, high) == CAUSAL, known or Known()):
                return pattern, [other for other in rest if other is not condition]
        if known and (listed := block_list(rest, (low, high) == CAUSAL, known.tensors, known.sizes)):
            return listed[0], [other for other in rest if other not in listed[1]]
    pattern, exact = pattern_around(low, high)
    return strided(pattern, rate), rest if exact else list(conditions)


def stretch_of(conditions: Sequence[Term]) -> tuple[float, float, int, list[Term]]:
    """(low, high, rate, the remaining conditions): low <= (k - q) / rate <= high, an integer."""
    bands = {condition: band for condition in conditions if (band := band_of(condition)) is not None}
    rates = {condition: rate for condition in conditions if (rate := rate_of(condition))}
    low = max((band[0] for band in bands.values()), default=-math.inf)
    high = min((band[1] for band in bands.values()), default=math.inf)
    rate = math.lcm(*rates.values())
    rest = [condition for condition in conditions if condition not in bands and condition not in rates]
    return -_floor(-low, rate), _floor(high, rate), rate, rest


def _floor(edge: float, rate: int) -> float:
    return edge if math.isinf(edge) else int(edge) // rate


def strided(pattern: str, rate: int) -> str:
    """The text of `pattern`, a band, dilated: every `rate`-th key."""
    if rate == 1:
        return pattern
    return f"{pattern[:-1]},rate={rate})" if pattern.endswith(")") else f"{pattern}(rate={rate})"


def structure(condition: Term, causal: bool, known: Known) -> str | None:
    """The pattern of `condition`, together with k <= q if `causal`; None without one."""
    if not isinstance(condition, Apply) or len(condition.args) != 2:
        return None
    left, right = condition.args
    if condition.op == "logical_or":
        band, first = (right, first_keys(left)) if first_keys(left) else (left, first_keys(right))
        return band_or_first(band, first, causal) if first else None
    if condition.op == "eq":
        both = "" if causal else ",both"
        size = chunk_of(left)
        if size and chunk_of(right) == size and axes_of([left]) != axes_of([right]):
            return f"chunked({size}{both})"
        edges = edges_of(left, right, known)
        if edges:
            return f"documents({','.join(map(str, edges))}{both})"
    return None


def band_or_first(band: Any, first: int, causal: bool) -> str | None:
    """The pattern of "`band` or k < `first`": a prefix, or a window with sinks; None without one."""
    low, high, rate, rest = stretch_of(conjuncts(band)) if isinstance(band, Term) else (*ANY, 1, [band])
    if rest or low > high:
        return None
    if (low, high, rate) == (*CAUSAL, 1) and not causal:
        return f"prefix({first})"
    pattern, exact = pattern_around(low, min(high, 0) if causal else high)
    if not exact or not pattern.startswith("window(") or causal is pattern.endswith("both)"):
        return None
    return strided(f"{pattern[:-1]},sinks={first})", rate)


def first_keys(condition: Any) -> int:
    """n where the condition is k < n, else 0."""
    if not isinstance(condition, Apply) or condition.op != "le" or not isinstance(condition.args[1], int):
        return 0
    left = condition.args[0]
    if not isinstance(left, Affine) or left.steps != (("k", 1),):
        return 0
    return max(condition.args[1] - left.start + 1, 0)


def chunk_of(term: Any) -> int:
    """c where the term is row // c, else 0."""
    if not isinstance(term, Apply) or term.op != "floor_divide" or not isinstance(term.args[1], int):
        return 0
    size = term.args[1]
    return size if size > 0 and isinstance(term.args[0], Term) and is_row([term.args[0]]) else 0


def edges_of(left: Any, right: Any, known: Known) -> list[int] | None:
    """Boundaries of packed sequences, 0 and the end included, if the terms are one known vector of ids read at the
    query and at the key, in which each id forms one run; else None."""
    if not (isinstance(left, Load) and isinstance(right, Load) and left.source is right.source):
        return None
    values = known.rows(left.source)
    at = {axis for term in (left, right) if is_row(term.index) for axis in term.axes}
    if values is None or at != {"q", "k"}:
        return None
    with unset_fake_temporarily():
        runs, lengths = torch.unique_consecutive(values, return_counts=True)
        if len(runs) > MOST_DOCUMENTS or len(runs.unique()) < len(runs) or bool((runs != runs).any()):
            return None
        return [0, *lengths.cumsum(0).tolist()]


def is_row(index: Sequence[Term]) -> bool:
    """Whether an index is the position of the query alone, or of the key."""
    place = index[0] if len(index) == 1 else None
    return isinstance(place, Affine) and place.start == 0 and place.steps in ((("q", 1),), (("k", 1),))


def pattern_around(low: float, high: float) -> tuple[str, bool]:
    """The narrowest pattern that contains low <= k - q <= high, and whether it is exactly that."""
    if math.isinf(low):
        return ("causal", high == 0) if high <= 0 else ("full", math.isinf(high))
    if high <= 0:
        return f"window({1 - int(low)})", high == 0
    if math.isinf(high):
        return "full", False
    width = int(max(-low, high)) + 1
    return f"window({width},both)", low == -high
