"""Terms: folding keeps every element, intervals hold every element, JSON gives the same object back."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ringopt.expr.evaluate import evaluate, show
from ringopt.expr.simplify import apply, cast, compare, negate, substitute, where
from ringopt.expr.terms import Affine, Term, affine, applied, axis, converted, dumps, load, loads_terms, number
from ringopt.expr.value_ranges import bounds
from ringopt.tools.benchmarks.lab.tensor_bytes import peak_bytes

Q, K, B = axis("q"), axis("k"), axis("b")
INT, BOOL, FLOAT = torch.int64, torch.bool, torch.float32
SIZES = {"b": 2, "q": 6, "k": 7}
SOURCES = [
    torch.tensor([[3, 0, 2, 2, -1, 5, 1], [0, 0, 1, 1, 1, 2, 2]]),
    torch.tensor([True, False, True, True, False, False, True]),
    torch.linspace(-2, 2, 7),
]
PLACES = {
    "b": torch.arange(2).view(-1, 1, 1), "q": torch.arange(6).view(1, -1, 1), "k": torch.arange(7).view(1, 1, -1),
}  # fmt: skip


def le(left, right):
    return apply("le", [left, right], BOOL)


# ---- folding ---------------------------------------------------------------------------------------------------------
def test_equal_terms_are_one_object():
    assert apply("sub", [K, Q], INT) is affine({"k": 1, "q": -1}, 0)
    assert load("x", [Q], INT) is load("x", [Q], INT)
    assert number(0.0, FLOAT) is not number(-0.0, FLOAT)


@pytest.mark.parametrize(
    ("term", "text"),
    [
        (le(K, Q), "(k-q <= 0)"),
        (apply("ge", [Q, K], BOOL), "(k-q <= 0)"),
        (apply("lt", [K, apply("add", [Q, 1], INT)], BOOL), "(k-q <= 0)"),
        (negate(apply("gt", [K, Q], BOOL)), "(k-q <= 0)"),
        (le(apply("abs", [apply("sub", [Q, K], INT)], INT), 3), "((k-q >= -3) & (k-q <= 3))"),
        (apply("eq", [load("x", [B, Q], INT), load("x", [B, Q], INT)], BOOL), "True"),
        (cast(apply("rsub", [cast(le(K, Q), FLOAT), 1.0], FLOAT), BOOL), "(k-q >= 1)"),
        (where(le(K, Q), number(True, BOOL), number(False, BOOL), BOOL), "(k-q <= 0)"),
        (where(le(K, Q), False, load("m", [K], BOOL), BOOL), "((k-q >= 1) & m[k])"),
        (apply("mul", [cast(load("m", [K], BOOL), FLOAT), -1e9], FLOAT), "where(m[k], -1e+09, -0)"),
        (cast(load("x", [K], INT), FLOAT), "float32(x[k])"),
        (apply("logical_not", [load("x", [K], FLOAT)], BOOL), "(x[k] == 0)"),
        (apply("logical_not", [compare("le", load("x", [K], FLOAT), 0.0)], BOOL), "logical_not((x[k] <= 0))"),
    ],
)
def test_folds_to(term, text):
    assert show(term) == text


def test_adding_zero_keeps_the_sign_of_zero():
    x = load("x", [K], FLOAT)
    assert apply("add", [x, -0.0], FLOAT) is x
    assert apply("add", [x, 0.0], FLOAT) is not x  # -0.0 + 0.0 is 0.0


def test_substitution_proves_that_the_diagonal_is_seen():
    same_document = apply("eq", [load("x", [B, Q], INT), load("x", [B, K], INT)], BOOL)
    condition = apply("logical_and", [same_document, le(K, Q)], BOOL)
    assert substitute(condition, {"k": Q}) is number(True, BOOL)


def test_detach_matters_only_where_a_gradient_could_pass():
    assert apply("detach", [load("x", [K], INT)], INT) is load("x", [K], INT)
    assert show(apply("detach", [load("x", [K], FLOAT)], FLOAT)) == "detach(x[k])"


# ---- JSON ------------------------------------------------------------------------------------------------------------
def test_json_is_deterministic_and_shares_operands():
    shared = apply("sub", [load(0, [B, K], INT), Q], INT)
    term = apply("mul", [shared, shared], INT)
    data = dumps(term, shared)
    assert data == [
        ["affine", "int64", {"b": 1}, 0],
        ["affine", "int64", {"k": 1}, 0],
        ["load", "int64", 0, [0, 1]],
        ["affine", "int64", {"q": 1}, 0],
        ["op", "int64", "sub", [[2], [3]], {}],
        ["op", "int64", "mul", [[4], [4]], {}],
        [5, 4],
    ]
    assert loads_terms(json.loads(json.dumps(data))) == (term, shared)


@pytest.mark.parametrize("value", [math.inf, -math.inf, -0.0, 1e-38, torch.finfo(FLOAT).min])
def test_json_keeps_every_float(value):
    term = where(le(K, Q), number(value, FLOAT), load(0, [K], FLOAT), FLOAT)
    (back,) = loads_terms(json.loads(json.dumps(dumps(term))))
    assert back is term


def test_json_has_numbers_and_words_as_they_are():
    """What JSON cannot say is a word: inf. The text is part of a graph, and read by people."""
    halved = applied("div", [load(0, [], FLOAT), 2.5], FLOAT, [("rounding_mode", "floor")])
    hidden = applied("maximum", [load(0, [], FLOAT), -math.inf], FLOAT)
    assert dumps(halved, hidden)[1:3] == [
        ["op", "float32", "div", [[0], 2.5], {"rounding_mode": "floor"}],
        ["op", "float32", "maximum", [[0], {"float": "-inf"}], {}],
    ]
    assert loads_terms(json.loads(json.dumps(dumps(halved, hidden)))) == (halved, hidden)


def test_json_knows_sources_by_number_only():
    with pytest.raises(TypeError, match="'mask': a source is written as its number"):
        dumps(load("mask", [K], INT))
    with pytest.raises(ValueError, match="kind 'lambda' is not known"):
        loads_terms([["lambda", "int64"], [0]])


# ---- laws, on drawn terms --------------------------------------------------------------------------------------------
INTEGERS = st.one_of(
    st.builds(lambda q, k, start: affine({"q": q, "k": k}, start), *[st.integers(-3, 3)] * 3),
    st.sampled_from([load(0, [B, K], INT), load(0, [B, Q], INT), load(0, [B, affine({"q": 1}, -2)], INT)]),
)
TRUTHS = st.sampled_from([load(1, [K], BOOL), load(1, [Q], BOOL), number(True, BOOL), number(False, BOOL)])
FLOATS = st.one_of(
    st.sampled_from([load(2, [K], FLOAT), load(2, [Q], FLOAT)]),
    st.sampled_from([0.0, -0.0, 1.0, -2.5, -1e9, -math.inf]).map(lambda value: number(value, FLOAT)),
)


def both_ways(op, dtype):
    """The term made with and without simplification."""
    return lambda *args: (
        apply(op, [arg[0] if isinstance(arg, tuple) else arg for arg in args], dtype),
        applied(op, [arg[1] if isinstance(arg, tuple) else arg for arg in args], dtype),
    )


def leaf(strategy):
    return strategy.map(lambda term: (term, term))


def converted_to(dtype):
    return lambda pair: (cast(pair[0], dtype), pair[1] if pair[1].dtype == dtype else converted(pair[1], dtype))


def grow(depth: int) -> tuple[st.SearchStrategy, st.SearchStrategy, st.SearchStrategy]:
    """(integer, truth, float) pairs of terms."""
    if depth == 0:
        return leaf(INTEGERS), leaf(TRUTHS), leaf(FLOATS)
    whole, truth, real = grow(depth - 1)
    small = st.integers(-3, 3)
    comparison = st.sampled_from(["le", "lt", "ge", "gt", "eq", "ne"])
    whole = whole | st.one_of(
        st.builds(both_ways("add", INT), whole, whole | small), st.builds(both_ways("sub", INT), whole, whole),
        st.builds(both_ways("mul", INT), whole, small), st.builds(both_ways("abs", INT), whole),
        st.builds(both_ways("minimum", INT), whole, whole), st.builds(both_ways("where", INT), truth, whole, whole),
        st.builds(both_ways("floor_divide", INT), whole, st.integers(1, 4)),
        st.builds(both_ways("remainder", INT), whole, st.integers(1, 4)), truth.map(converted_to(INT)),
        st.builds(both_ways("maximum", INT), whole, whole), st.builds(both_ways("neg", INT), whole),
        st.builds(both_ways("clamp", INT), whole, small, st.integers(1, 6)),
    )  # fmt: skip
    truth = truth | st.one_of(
        st.builds(lambda op, a, b: both_ways(op, BOOL)(a, b), comparison, whole, whole | small),
        st.builds(lambda op, a, b: both_ways(op, BOOL)(a, b), comparison, real, real),
        st.builds(both_ways("logical_and", BOOL), truth, truth), st.builds(both_ways("logical_or", BOOL), truth, truth),
        st.builds(both_ways("logical_not", BOOL), truth), whole.map(converted_to(BOOL)), real.map(converted_to(BOOL)),
    )  # fmt: skip
    real = real | st.one_of(
        st.builds(both_ways("add", FLOAT), real, real), st.builds(both_ways("mul", FLOAT), real, real),
        st.builds(both_ways("rsub", FLOAT), real, st.just(1.0)),
        st.builds(both_ways("where", FLOAT), truth, real, real),
        st.builds(both_ways("div", FLOAT), real, real), st.builds(both_ways("abs", FLOAT), real),
        st.builds(both_ways("clamp", FLOAT), real, st.just(-1.0)), whole.map(converted_to(FLOAT)),
        st.builds(both_ways("maximum", FLOAT), real, real), truth.map(converted_to(FLOAT)),
    )  # fmt: skip
    return whole, truth, real


SPAN = {name: st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(
    lambda ends, size=size: range(ends[0], min(ends[0] + ends[1], size))) for name, size in SIZES.items()}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.one_of(*grow(3)), st.fixed_dictionaries(SPAN))
def test_folding_keeps_every_element_and_bounds_hold_them(pair, spans):
    folded, plain = pair
    places = {
        name: torch.arange(span.start, span.stop).view([-1 if other == name else 1 for other in SIZES])
        for name, span in spans.items()
    }
    expected = evaluate(plain, places, SOURCES)
    found = evaluate(folded, places, SOURCES)
    assert found.dtype == expected.dtype
    assert torch.equal(*torch.broadcast_tensors(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0)))
    for term in pair:
        low, high = bounds(term, spans, SOURCES)
        values = evaluate(term, places, SOURCES)
        values = values[~values.isnan()] if values.is_floating_point() else values
        assert not values.numel() or (low <= values.min().item() and values.max().item() <= high), show(term)
        if evaluate(term, places, SOURCES).isnan().any():
            assert (low, high) == (-math.inf, math.inf)


@settings(max_examples=100, deadline=None)
@given(st.one_of(*grow(2)))
def test_json_round_trip(pair):
    for term in pair:
        assert loads_terms(json.loads(json.dumps(dumps(term)))) == (term,)


# ---- intervals -------------------------------------------------------------------------------------------------------
def full_spans(**given: range) -> dict[str, range]:
    return {name: range(size) for name, size in SIZES.items()} | given


ROW, COLUMN = converted(Q, FLOAT), converted(K, FLOAT)  # 0 to 5, and 0 to 6
TIGHT = {
    "clamped": (applied("clamp", [Q, 2, 4], INT), (2, 4)),
    "clamped below": (applied("clamp", [Q, 2], INT), (2, 5)),
    "clamped above": (applied("clamp", [Q, -3, 4], INT), (0, 4)),
    "the larger": (applied("maximum", [Q, affine({"k": -1}, 3)], INT), (0, 5)),
    "the smaller": (applied("minimum", [Q, affine({"k": -1}, 3)], INT), (-3, 3)),
    "size alone": (applied("abs", [affine({"q": 1}, -2)], INT), (0, 3)),
    "size of negative ones": (applied("abs", [affine({"q": 1}, -9)], INT), (4, 9)),
    "times": (applied("mul", [affine({"q": 1}, -2), affine({"k": 1}, -1)], INT), (-10, 15)),
    "quotients": (applied("div", [ROW, applied("sub", [COLUMN, 8.0], FLOAT)], FLOAT), (-2.5, 0.0)),
    "floors": (applied("floor_divide", [affine({"q": 1}, -2), 2], INT), (-1, 1)),
    "rests of one floor": (applied("remainder", [affine({"k": 1}, 10), 10], INT), (0, 6)),
    "rests": (applied("remainder", [affine({"k": 1}, 7), 10], INT), (0, 9)),
    "always below": (applied("lt", [Q, affine({"k": 1}, 6)], BOOL), (True, True)),
    "never below": (applied("lt", [affine({"q": 1}, 6), K], BOOL), (False, False)),
    "sometimes below": (applied("lt", [affine({"q": 1}, 5), K], BOOL), (False, True)),
    "at most": (applied("le", [Q, affine({"k": 1}, 5)], BOOL), (True, True)),
    "never at most": (applied("le", [affine({"q": 1}, 7), K], BOOL), (False, False)),
    "at least": (applied("ge", [affine({"q": 1}, 6), K], BOOL), (True, True)),
    "never above": (applied("gt", [Q, affine({"k": 1}, 5)], BOOL), (False, False)),
    "never equal": (applied("eq", [Q, affine({"k": 1}, 6)], BOOL), (False, False)),
    "always unequal": (applied("ne", [affine({"q": 1}, 7), K], BOOL), (True, True)),
    "chosen": (applied("where", [applied("lt", [Q, 6], BOOL), K, affine({"q": 1}, 90)], INT), (0, 6)),
    "not chosen": (applied("where", [applied("lt", [Q, 0], BOOL), K, affine({"q": 1}, 90)], INT), (90, 95)),
    "of both": (applied("where", [applied("lt", [Q, 3], BOOL), K, affine({"q": 1}, 90)], INT), (0, 95)),
    "is there": (converted(affine({"q": 1}, 1), BOOL), (True, True)),
    "may be there": (converted(Q, BOOL), (False, True)),
}


@pytest.mark.parametrize("name", TIGHT)
def test_bounds_that_are_tight(name):
    """Where operands have no element in common: what is empty or full is recognised."""
    term, expected = TIGHT[name]
    assert bounds(term, full_spans(), []) == expected


def test_bounds_of_bfloat16_are_rounded_as_its_values_are():
    wide: Term = cast(affine({"q": 1}, 256), torch.bfloat16)  # 257 is 256 or 258 in bfloat16
    term = apply("add", [wide, converted(K, torch.bfloat16)], torch.bfloat16)
    spans = full_spans()
    low, high = bounds(term, spans, [])
    values = evaluate(term, PLACES, [])
    assert low <= values.min() and values.max() <= high


def test_bounds_know_nothing_of_nan():
    vector = load(0, [K], FLOAT)
    assert bounds(vector, full_spans(), [torch.tensor([0.0, math.nan, 1, 1, 1, 1, 1])]) == (-math.inf, math.inf)
    assert bounds(compare("le", vector, math.inf), full_spans(), [torch.full((7,), math.nan)]) == (False, True)


def test_bounds_are_read_in_pieces():
    """Of 524,288 places, which would take 8 MiB at once."""
    table, spans = torch.randn(518, dtype=torch.float64), {"h": range(8), "q": range(256), "k": range(256)}
    term = load("x", [affine({"h": 1, "q": 1, "k": 1}, 0)], torch.float64)
    assert bounds(term, spans, {"x": table}) == (table.min(), table.max())
    assert peak_bytes(lambda: bounds(term, spans, {"x": table})) < 2**21


def test_bounds_of_small_integers_may_wrap():
    term = applied("add", (load(0, [K], torch.uint8), 200), torch.uint8)
    assert bounds(term, full_spans(), [torch.full((7,), 100, dtype=torch.uint8)]) == (0, 255)


def test_unknown_sources_may_be_anything():
    assert bounds(load("x", [K], BOOL), full_spans(), {}) == (False, True)
    assert bounds(load("x", [K], FLOAT), full_spans(), {}, lambda each: (-1.0, 1.0)) == (-1.0, 1.0)


def test_affine_is_read_at_the_ends_of_the_span():
    term = affine({"q": 2, "k": -3}, 1)
    assert isinstance(term, Affine)
    assert bounds(term, full_spans(q=range(2, 4), k=range(5, 7)), []) == (2 * 2 - 3 * 6 + 1, 2 * 3 - 3 * 5 + 1)


def test_a_fake_element_has_the_shape_of_a_real_one():
    """An index without dims stands behind one that has some."""
    term, places = load(0, [axis("h"), number(0, INT)], FLOAT), {"h": torch.arange(3).view(1, 3, 1, 1)}
    with FakeTensorMode() as mode:
        fake = evaluate(term, {"h": mode.from_tensor(places["h"])}, [mode.from_tensor(torch.ones(3, 1))])
    assert fake.shape == evaluate(term, places, [torch.ones(3, 1)]).shape == (1, 3, 1, 1)
