"""What a fill hides: -inf always, a finite number only where no score can reach it and every row sees a key."""

from __future__ import annotations

import math

import pytest
import torch
import torch.fx as fx

from ringopt.expr.evaluate import show
from ringopt.expr.simplify import apply, compare, logic, negate, where
from ringopt.expr.terms import axis, load, number
from ringopt.ir.constants import Constants
from ringopt.recognize.additive_mask import peel
from ringopt.recognize.lift import Cone

Q, K = axis("q"), axis("k")
CAUSAL = compare("le", K, Q)
SEEN = load("seen", [axis("b"), K], torch.bool)


def taken_apart(mask, q=16, k=16, learned=("table",)):
    found = peel(mask, Cone(Constants(fx.Graph(), {}), {"b": 2, "h": 2, "q": q, "k": k}), learned.__contains__)
    return [show(condition) for condition in found.conditions], show(found.bias) if found.bias is not None else None


def filled(condition, value, dtype=torch.float32, kept=0.0):
    return where(condition, kept, number(value, dtype), dtype)


def minimum(dtype):
    return torch.finfo(dtype).min


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lowest_number_of_a_dtype_hides(dtype):
    assert taken_apart(filled(CAUSAL, minimum(dtype), dtype)) == (["(k-q <= 0)"], None)


@pytest.mark.parametrize("value", [-65504.0, -1e8, -100.0])
def test_number_that_float32_scores_could_reach_does_not(value):
    conditions, bias = taken_apart(filled(CAUSAL, value))
    assert not conditions and bias is not None


def test_every_row_must_see_a_key():
    seen_by_all = logic("logical_and", CAUSAL, SEEN)
    assert taken_apart(filled(seen_by_all, -math.inf)) == (["(k-q <= 0)", "seen[b, k]"], None)
    conditions, bias = taken_apart(filled(seen_by_all, minimum(torch.float32)))
    assert not conditions and bias is not None


def test_no_row_without_the_first_key_needs_the_diagonal():
    assert taken_apart(filled(compare("le", K, 3), -1e9), q=20, k=16) == (["(k <= 3)"], None)
    assert taken_apart(filled(compare("ge", K, 12), -1e9), q=20, k=16) == (["(k >= 12)"], None)
    later = compare("ge", K, Q)  # query 16 of 20 has no key of its own
    assert taken_apart(filled(later, -1e9), q=20, k=16)[0] == []
    assert taken_apart(filled(later, -1e9), q=16, k=16)[0] == ["(k-q >= 0)"]


def test_infinite_part_hides_even_where_the_finite_part_does_not():
    mask = apply("add", [filled(CAUSAL, -math.inf), filled(SEEN, -1e9)], torch.float32)
    assert taken_apart(mask) == (["(k-q <= 0)"], "where(seen[b, k], 0, -1e+09)")


def test_bias_of_a_model_is_small_and_of_an_input_may_be_anything():
    table, given = (load(name, [axis("h"), K], torch.float32) for name in ("table", "given"))
    assert taken_apart(filled(CAUSAL, -1e9, kept=table)) == (["(k-q <= 0)"], "table[h, k]")
    assert taken_apart(filled(CAUSAL, -1e9, kept=given)) == ([], "where((k-q <= 0), given[h, k], -1e+09)")
    assert taken_apart(filled(CAUSAL, -math.inf, kept=given)) == (["(k-q <= 0)"], "given[h, k]")


def test_choices_between_nothing_and_hidden_nest():
    inner = filled(SEEN, -math.inf)
    assert taken_apart(where(compare("le", Q, 3), 0.0, inner, torch.float32)) == (
        ["((q <= 3) | ((q >= 4) & seen[b, k]))"], None
    )  # fmt: skip


def test_a_finite_fill_on_one_side_of_a_choice_may_leave_a_row_without_a_key():
    for fills in ((-1e9, -math.inf), (-math.inf, -1e9)):
        yes, no = (filled(SEEN, fill) for fill in fills)
        conditions, bias = taken_apart(where(compare("le", Q, 3), yes, no, torch.float32))
        assert not conditions and bias is not None


def test_sums_and_differences():
    penalty = where(negate(SEEN), number(math.inf, torch.float32), 0.0, torch.float32)
    table = load("table", [axis("h"), K], torch.float32)
    both = apply("sub", [apply("add", [table, filled(CAUSAL, -math.inf)], torch.float32), penalty], torch.float32)
    assert taken_apart(both) == (["(k-q <= 0)", "seen[b, k]"], "table[h, k]")
    twice = apply("add", [table, table], torch.float32)
    assert taken_apart(twice) == ([], "(table[h, k] + table[h, k])")


def test_hidden_everywhere():
    assert taken_apart(number(-math.inf, torch.float32)) == (["False"], None)
    assert taken_apart(number(minimum(torch.float32), torch.float32)) == ([], "-3.40282e+38")
