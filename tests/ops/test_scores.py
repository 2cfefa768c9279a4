"""What is done to scores and weights, on one device and over ranks, beside attention written out. With gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ringopt.errors import RingMismatchError
from ringopt.expr.mask import Mask
from ringopt.expr.simplify import where
from ringopt.expr.terms import axis, load, number
from ringopt.ops.ring import VERSION
from tests.context_parallel.reference import assert_near, problem
from tests.harness.limits import set_limits
from tests.harness.threads import ThreadMesh, run_on_threads
from tests.ops.scored import (
    CASES,
    DOUBLE,
    FILLS,
    HEADS,
    INF,
    KEPT,
    PADDING,
    ROWS,
    SCORE,
    UNSEEN,
    Case,
    N,
    dense,
    draw,
    filled_case,
    of,
    on_one_device,
    over_ranks,
)

WAYS = [(1, "contiguous", "ring"), (2, "zigzag", "ring"), (3, "zigzag", "gather"), (4, "contiguous", "ring")]
# For masks without rows of a rank.
OTHER_WAYS = [(3, "zigzag", "ulysses"), (3, "zigzag", "ring_q"), (4, "zigzag", "hybrid(2)")]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES | FILLS)
def test_numbers(name: str) -> None:
    case, given = (CASES | FILLS)[name], problem(N)
    expected = dense(case, given)
    for found, right in zip(on_one_device(case, given), expected, strict=True):
        assert_near(found, right, 1e-12)
    for way in WAYS if case.mask.row_dims else WAYS + OTHER_WAYS:
        for found, right in zip(over_ranks(case, given, *way), expected, strict=True):
            assert_near(found, right, 1e-12)


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_rows_that_see_nothing_but_a_fill_in_float32(fill: float) -> None:
    given = problem(N)
    expected = dense(filled_case(fill), given)
    case, single = filled_case(fill, torch.float32), given.to(torch.float32)
    for found in (on_one_device(case, single), *(over_ranks(case, single, *way) for way in WAYS)):
        for got, right in zip(found, expected, strict=True):
            assert_near(got, right, 1e-3 if fill == -1e4 else 1e-5)  # float32 has steps of 1e-3 at 1e4
    uniform = given.v[:1].repeat_interleave(2, 1).mean(2, keepdim=True)
    assert_near(on_one_device(case, single)[0][:1, :, :5], uniform.expand(1, HEADS, 5, 8), 1e-3)


@pytest.mark.parametrize("name", ["temperature and bias of one source", "dropout, sinks, softcap", "fill -1e+09"])
def test_numbers_a_few_rows_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, mask=40)
    set_limits(monkeypatch, scores=8 * 8 * 30)
    case, given = (CASES | FILLS)[name], problem(N)
    for found, right in zip(over_ranks(case, given, 3, "zigzag", "ring", "math"), dense(case, given), strict=True):
        assert_near(found, right, 1e-12)


@pytest.mark.parametrize("name", ["softcap", "sinks and padding", "dropout, causal", "rows of a dense bias"])
def test_bfloat16(name: str) -> None:
    case, given = CASES[name], problem(N).to(torch.bfloat16)
    expected = dense(case, given.to(DOUBLE))
    for found in (on_one_device(case, given), over_ranks(case, given, 2, "zigzag", "ring")):
        assert found[0].dtype == torch.bfloat16
        for got, right in zip(found, expected, strict=True):
            assert_near(got, right, 4e-2)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("added", [1e9, -1e9])
def test_large_numbers_are_added_to_some_keys_or_all(added: float, dtype: torch.dtype) -> None:
    bias = where(KEPT, number(0.0, dtype), added, dtype)
    add = torch.zeros(2, 1, 1, N, dtype=dtype).masked_fill(UNSEEN, added)
    case = Case(Mask(bias=bias, nan=True), (PADDING,), add=lambda _: add, pattern="causal")
    given = problem(N).to(dtype)
    expected = dense(case, given)
    for found in (on_one_device(case, given), *(over_ranks(case, given, *way) for way in WAYS)):
        for got, right in zip(found, expected, strict=True):
            assert_near(got, right, 1e-5 if dtype == torch.float32 else 1e-12)


def test_a_row_of_finite_fills_gives_all_to_its_sink() -> None:
    case, given = replace(filled_case(-1e9), sinks=draw(1, HEADS)), problem(N)
    for found in (on_one_device(case, given), over_ranks(case, given, 3, "zigzag", "ring")):
        for got, right in zip(found, dense(case, given), strict=True):
            assert_near(got, right, 1e-12)
        assert not found[0][0, :, :5].any()


# ---- rows that are NaN -----------------------------------------------------------------------------------------------
HIDING = Case(
    Mask(KEPT, nan=True), (PADDING,), add=lambda _: torch.zeros(2, 1, 1, N, dtype=DOUBLE).masked_fill(UNSEEN, -INF),
    pattern="causal",
)  # fmt: skip


@pytest.mark.parametrize("way", [None, *WAYS, *OTHER_WAYS])
def test_nan_rows_are_those_of_softmax(way: tuple[int, str, str] | None) -> None:
    given = problem(N)
    found = on_one_device(HIDING, given) if way is None else over_ranks(HIDING, given, *way)
    out, *grads = dense(HIDING, given, hidden_is=torch.nan)
    assert out[0, :, :5].isnan().all() and not out[0, :, 5:].isnan().any() and not out[1].isnan().any()
    for got, right in zip(found, (out, *grads), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_without_the_flag_and_with_a_sink_such_a_row_is_0() -> None:
    given = problem(N)
    for case in (replace(HIDING, mask=Mask(KEPT)), replace(HIDING, sinks=draw(1, HEADS))):
        for found in (on_one_device(case, given), over_ranks(case, given, 2, "zigzag", "ring")):
            assert not found[0][0, :, :5].any()
            assert all(x.isfinite().all() for x in found)


def test_a_learned_source_is_nan_where_a_row_is() -> None:
    case = replace(HIDING, mask=Mask(KEPT, score=of("mul", SCORE, load(1, [axis("h")], DOUBLE)), nan=True))
    case = replace(
        case, sources=(PADDING, draw(HEADS)), change=lambda s, _, t: s * t[:, None, None], add=lambda *_: HIDING.add(0)
    )
    for found in (on_one_device(case, problem(N)), over_ranks(case, problem(N), 3, "contiguous", "ring")):
        assert found[4].isnan().all()


# ---- ranks that differ, and what does not fit ------------------------------------------------------------------------
def refused(p: int, changed: Callable[[int], Case], seed: Callable[[int], int] = lambda rank: 77) -> str:
    """What all ranks say when rank r is to compute changed(r)."""
    x = torch.ones(2, HEADS, 6, 8, dtype=DOUBLE)

    def body(mesh: ThreadMesh) -> str:
        case = changed(mesh.rank)
        drop = torch.tensor(seed(mesh.rank)) if case.dropout_p else None
        with pytest.raises(RingMismatchError) as raised:
            torch.ops.ringopt.ring_attention(
                *(x, x, x, list(case.sources), case.sinks, drop, 6 * p, 6 * p, case.pattern, case.mask.text, []),
                *(case.dropout_p, 1.0, "contiguous", "contiguous", "ring", "auto", mesh.name, VERSION),
            )
        return str(raised.value)

    (told,) = set(run_on_threads(p, body))
    return told


def test_ranks_that_differ() -> None:
    told = refused(3, lambda rank: Case(dropout_p=0.2 if rank == 1 else 0.1))
    assert "rank 1 has dropout_p=0.2, but ranks 0, 2 have dropout_p=0.1" in told
    told = refused(2, lambda rank: Case(dropout_p=0.1), seed=lambda rank: 5 + rank)
    assert "the ranks draw random numbers by seeds [5, 6], and must do so by one" in told
    told = refused(3, lambda rank: Case(sinks=torch.ones(1 + (rank == 2), HEADS)))
    assert 'rank 2 has sinks="[2, 4]", but ranks 0, 1 have sinks="[1, 4]"' in told


def test_what_does_not_fit() -> None:
    told = refused(2, lambda rank: Case(Mask(bias=ROWS), (torch.ones(2, HEADS, 6 - rank, 12),)))
    assert "source 0 of the mask is [2, 4, 5, 12], and this rank holds 6 rows of the queries (dim 2); cut it as" in told
    told = refused(2, lambda rank: Case(sinks=torch.ones(HEADS)))
    assert "sinks are [4], and 2 x 4 heads take [1, 4] or [2, 4]" in told
    told = refused(1, lambda rank: Case(dropout_p=1.5))
    assert "dropout_p is 1.5, seed 77; a probability is from 0 to 1, and above 0 takes a seed" in told
    x = torch.ones(1, 1, 2, 8)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5, and there is no seed to draw from"):
        torch.ops.ringopt.attention(x, x, x, None, [], None, None, "full", "", 0.5, 1.0)
