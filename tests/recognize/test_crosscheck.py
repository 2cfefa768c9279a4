"""What was read of scores, held against the program's own: a difference is a sentence that says where."""

from __future__ import annotations

import math

import pytest
import torch

from ringopt.expr.simplify import apply, compare, where
from ringopt.expr.terms import axis, score
from ringopt.recognize.crosscheck import of_scores
from ringopt.recognize.reading import reading_of
from ringopt.recognize.scores import Scores

S = score(torch.float32)
CAUSAL = compare("le", axis("k"), axis("q"))


def difference(scale, conditions):
    """Of a program that halves the scores and hides the keys behind a query: 5 queries and 7 keys."""
    term = where(CAUSAL, apply("mul", [S, 0.5], torch.float32), -math.inf, torch.float32)
    reading = reading_of(conditions, None, lambda source: False)
    return of_scores(reading, Scores(scale=scale), {"b": 2, "h": 3, "q": 5, "k": 7}, {}, term)


def test_what_is_read_as_it_is_has_no_difference():
    assert difference(0.5, [CAUSAL]) == ""


@pytest.mark.parametrize(
    ("scale", "conditions", "name"),
    [
        (0.25, [CAUSAL], "causal"),
        (0.5, [], "full"),  # -inf is no number that a score could be near to
        (0.5, [CAUSAL, compare("ge", axis("k"), axis("q"))], "window(1)"),  # more is hidden than the program hides
    ],
)
def test_a_wrong_reading_is_told_by_name_and_place(scale, conditions, name):
    assert difference(scale, conditions) == (
        f"the mask read as {name} differs from the program's own in queries 0 to 4, keys 0 to 6: "
        "a fault of ringopt, please report it"
    )
