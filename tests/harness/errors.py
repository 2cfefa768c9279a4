"""Errors of what is compared number by number."""

from __future__ import annotations

import math


def worst_of(*errors: float) -> float:
    """The largest; infinite where one is not a number, which `max` passes over."""
    return math.inf if any(map(math.isnan, errors)) else max(errors)
