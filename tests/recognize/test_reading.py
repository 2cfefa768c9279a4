"""Of a pair that is not seen nothing is asked: choices that the mask decides leave a bias."""

from __future__ import annotations

import pytest
import torch

from ringopt.expr.bands import Known
from ringopt.expr.evaluate import show
from ringopt.expr.simplify import apply, compare, where
from ringopt.expr.terms import affine, axis, load
from ringopt.recognize.reading import reading_of, where_seen

K, Q = axis("k"), axis("q")
AWAY = affine({"k": 1, "q": -1}, 0)
NEAR, FAR = load("near", [K], torch.float32), load("far", [K], torch.float32)
CAUSAL, WINDOW = compare("le", K, Q), compare("ge", AWAY, -3)


def chosen(condition, mask):
    """Which of two tables is left where `mask` hides the other's pairs, of 6 queries and 8 keys."""
    bias = where(condition, NEAR, FAR, torch.float32)
    return show(where_seen(bias, mask, {"q": 6, "k": 8}, lambda source: False))


@pytest.mark.parametrize(
    ("condition", "mask", "left"),
    [
        (CAUSAL, [CAUSAL], "near[k]"),
        (compare("ge", AWAY, 1), [CAUSAL], "far[k]"),
        (compare("ge", AWAY, 0), [CAUSAL], "where((k-q >= 0), near[k], far[k])"),  # a query sees itself
        (compare("ge", AWAY, -3), [CAUSAL], "where((k-q >= -3), near[k], far[k])"),
        (compare("ge", AWAY, -3), [CAUSAL, WINDOW], "near[k]"),
        (compare("ge", AWAY, -2), [CAUSAL, WINDOW], "where((k-q >= -2), near[k], far[k])"),
        (compare("ge", AWAY, -5), [CAUSAL], "near[k]"),  # no query is farther from a key
        (compare("le", AWAY, 7), [WINDOW], "near[k]"),
        (compare("le", AWAY, 6), [WINDOW], "where((k-q <= 6), near[k], far[k])"),
        (compare("le", apply("mul", [AWAY, 2], torch.int64), 1), [CAUSAL], "near[k]"),
        (compare("le", affine({"k": 1, "q": 1}, 0), 12), [CAUSAL], "near[k]"),  # the last of both
        (compare("le", affine({"k": 1, "q": 1}, 0), 11), [CAUSAL], "where((k+q <= 11), near[k], far[k])"),
    ],
)
def test_what_the_conditions_decide_is_no_choice(condition, mask, left):
    assert chosen(condition, mask) == left


def test_what_is_read_of_a_site_has_no_choice_that_its_pattern_decides():
    near, far = map(torch.fx.Graph().placeholder, ("near", "far"))
    bias = where(CAUSAL, *(load(source, [K], torch.float32) for source in (near, far)), torch.float32)
    found = reading_of([CAUSAL], bias, lambda source: False, known=Known({}, {"q": 6, "k": 8}))
    assert (found.pattern, found.sources, found.name) == ("causal", (near,), "causal & bias(near)")
    assert reading_of([CAUSAL], bias, lambda source: False).sources == (near, far)  # of unknown lengths


def test_a_row_without_keys_is_0_unless_its_program_makes_it_nan():
    """A mask that is handed to attention says nothing of such rows: they are 0, as those of SDPA."""
    assert not reading_of([WINDOW], None, lambda source: False).mask.nan
    assert reading_of([WINDOW], None, lambda source: False, nan=True).mask.nan
