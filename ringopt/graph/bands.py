"""Conditions on k - q as the structural pattern of a site: what an exchange plan can use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ringopt.graph.terms import Affine, Apply, Term, constant, number

# k - q, the only difference that a pattern knows
DIFFERENCE = (("k", 1), ("q", -1))


def band_of(condition: Term) -> tuple[float, float] | None:
    """(low, high) of low <= k - q <= high; None for another condition."""
    if not isinstance(condition, Apply) or condition.op not in ("le", "ge", "eq"):
        return None
    left, right = condition.args
    if not isinstance(left, Affine) or left.steps != DIFFERENCE or not isinstance(right, int):
        return None
    return (-math.inf if condition.op == "le" else right, math.inf if condition.op == "ge" else right)


def split(conditions: Sequence[Term]) -> tuple[str, list[Term]]:
    """The pattern, and the conditions that it does not say. All of them together hide what `conditions` hide.

    Where the band of all conditions on k - q is no pattern, the narrowest pattern around it is taken and they stay.
    """
    bands = {condition: band for condition in conditions if (band := band_of(condition)) is not None}
    low = max((band[0] for band in bands.values()), default=-math.inf)
    high = min((band[1] for band in bands.values()), default=math.inf)
    if low > high or any(constant(condition) is False for condition in conditions):
        return "full", [number(False, torch.bool)]
    pattern, exact = pattern_around(low, high)
    return pattern, [condition for condition in conditions if not exact or condition not in bands]


def pattern_around(low: float, high: float) -> tuple[str, bool]:
    """The narrowest pattern that sees all of low <= k - q <= high, and whether it sees nothing else."""
    if math.isinf(low):
        return ("causal", high == 0) if high <= 0 else ("full", math.isinf(high))
    if high <= 0:
        return f"window({1 - int(low)})", high == 0
    if math.isinf(high):
        return "full", False
    width = int(max(-low, high)) + 1
    return f"window({width},both)", low == -high
