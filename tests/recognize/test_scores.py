"""Scores taken apart: a product, and what is done to it."""

from __future__ import annotations

import torch

from ringopt.expr.simplify import apply
from ringopt.expr.terms import axis, load
from ringopt.ir.constants import Constants
from ringopt.recognize.lift import Cone
from ringopt.recognize.scores import peel_scores

HALF = torch.bfloat16
PRODUCT = load("product", [axis("h"), axis("q"), axis("k")], HALF)


def taken_apart(term):
    cone = Cone(Constants(torch.fx.Graph(), {}), {"b": 2, "h": 3, "q": 5, "k": 5})
    return peel_scores(term, PRODUCT, cone, lambda source: False, lambda source: source == "product")


def test_a_number_is_the_scale_as_it_is_written():
    """PyTorch multiplies bfloat16 by the number itself; 0.1 as a bfloat16 would be 0.10009765625."""
    found = taken_apart(apply("mul", [PRODUCT, 0.1], HALF))
    assert (found.scale, found.factors) == (0.1, [])


def test_a_tensor_is_a_factor_of_the_dtype_that_the_product_is_made_in():
    counts = load("counts", [axis("h")], torch.int64)
    (factor,) = taken_apart(apply("mul", [counts, PRODUCT], HALF)).factors
    assert (factor.dtype, factor.axes) == (HALF, {"h"})
