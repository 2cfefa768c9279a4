"""What is done to scores and weights, on one device and over ranks, beside attention written out. With gradients.

Each case is a mask with its sources, and the same in dense tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from ringopt.attention import tiles
from ringopt.attention.dropout import Dropout
from ringopt.errors import RingMismatchError
from ringopt.graph.mask import Mask
from ringopt.graph.term_folding import apply, where
from ringopt.graph.terms import Term, affine, axis, load, number, score
from ringopt.kernels import math
from ringopt.ops import attention as _attention  # noqa: F401  (registers the operator)
from ringopt.ops.ring import VERSION
from tests.attention.reference import Problem, assert_near, join, problem, rows_of, shard, visible
from tests.threads import ThreadMesh, run_on_threads

DOUBLE, N, HEADS = torch.float64, 17, 4
INF = float("inf")
SCORE = score(DOUBLE)
SEED = torch.tensor(77)


def draw(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE, generator=torch.Generator().manual_seed(sum(sizes)))


NOTHING = Mask()


@dataclass(frozen=True)
class Case:
    """`change` and `add` are the mask in dense tensors: of scores [B, H, n, n] and `sources`, whole."""

    mask: Mask = NOTHING
    sources: tuple[Tensor, ...] = ()
    change: Callable[..., Tensor] = lambda scores, *sources: scores
    add: Callable[..., Tensor] = lambda *sources: torch.zeros((), dtype=DOUBLE)
    pattern: str = "full"
    sinks: Tensor | None = None
    dropout_p: float = 0.0

    @property
    def learned(self) -> list[int]:
        return list(self.mask.differentiable)


def of(op: str, *args: Term | float) -> Term:
    return apply(op, args, DOUBLE)


def compare(op: str, *args: Term | float) -> Term:
    return apply(op, args, torch.bool)


KEPT = compare("ne", load(0, [axis("b"), axis("k")], torch.int64), 0)  # a padding vector
PADDING = torch.ones(2, N, dtype=torch.int64)
PADDING[0, :5], PADDING[1, 11:] = 0, 0
UNSEEN = (PADDING == 0)[:, None, None]
FUTURE = ~torch.ones(N, N, dtype=torch.bool).tril()
ABOVE = compare("le", axis("k"), axis("q"))


def filled(fill: float, condition: Term, dtype: torch.dtype = DOUBLE) -> Mask:
    """masked_fill(score, ~condition, fill)."""
    zero = number(0.0, dtype)
    return Mask(bias=where(condition, zero, fill, dtype), score=where(condition, score(dtype), zero, dtype))


SOFTCAP = of("mul", of("tanh", of("mul", SCORE, 0.5)), 2.0)
TEMPERATURE = of("mul", SCORE, load(0, [axis("h")], DOUBLE))
ROWS = load(0, [axis("b"), axis("h"), axis("r"), axis("k")], DOUBLE)

CASES = {
    "softcap": Case(Mask(score=SOFTCAP), change=lambda s: (s * 0.5).tanh() * 2, pattern="causal"),
    "softcap in a window": Case(Mask(score=SOFTCAP), change=lambda s: (s * 0.5).tanh() * 2, pattern="window(5)"),
    "temperature": Case(Mask(score=TEMPERATURE), (draw(HEADS),), lambda s, t: s * t[:, None, None], pattern="causal"),
    "temperature of tokens, and padding": Case(
        Mask(KEPT, score=of("mul", SCORE, load(1, [axis("b"), axis("q")], DOUBLE))),
        (PADDING, draw(2, N)),
        lambda s, _, t: s * t[:, None, :, None],
        lambda *_: torch.zeros(2, 1, 1, N, dtype=DOUBLE).masked_fill(UNSEEN, -INF),
    ),
    "temperature and bias of one source": Case(
        Mask(score=TEMPERATURE, bias=load(0, [axis("h")], DOUBLE)),
        (draw(HEADS),),
        lambda s, t: s * t[:, None, None],
        lambda t: t[:, None, None],
    ),
    "a causal fill": Case(
        filled(-1e9, ABOVE),
        change=lambda s: s.masked_fill(FUTURE, 0.0),
        add=lambda: torch.zeros(N, N, dtype=DOUBLE).masked_fill(FUTURE, -1e9),
    ),
    "sinks": Case(sinks=draw(1, HEADS)),
    "sinks of a batch, causal": Case(sinks=draw(2, HEADS), pattern="causal"),
    "sinks in a window": Case(sinks=draw(1, HEADS), pattern="window(4,both)"),
    "sinks and padding": Case(
        Mask(KEPT),
        (PADDING,),
        add=lambda _: torch.zeros(2, 1, 1, N, dtype=DOUBLE).masked_fill(UNSEEN, -INF),
        pattern="causal",  # the first rows of batch 0 see nothing but the sink
        sinks=draw(1, HEADS),
    ),
    "dropout": Case(dropout_p=0.4),
    "dropout, causal": Case(dropout_p=0.1, pattern="causal"),
    "dropout of everything": Case(dropout_p=1.0),
    "dropout, sinks, softcap": Case(
        Mask(score=SOFTCAP), (), lambda s: (s * 0.5).tanh() * 2, sinks=draw(1, HEADS), dropout_p=0.3, pattern="causal"
    ),
    "rows of a dense bias": Case(Mask(bias=ROWS), (draw(2, HEADS, N, N),), add=lambda bias: bias, pattern="causal"),
    "rows of a bias for all heads": Case(
        Mask(bias=load(0, [affine({}, 0), affine({}, 0), axis("r"), axis("k")], DOUBLE)),
        (draw(1, 1, N, N),),
        add=lambda bias: bias,
    ),
    "rows that scale scores": Case(Mask(score=of("mul", SCORE, ROWS)), (draw(2, HEADS, N, N),), lambda s, t: s * t),
}  # fmt: skip


def filled_case(fill: float, dtype: torch.dtype = DOUBLE) -> Case:
    """Left padding and the future hidden by one finite fill: the first rows of batch 0 weigh all keys alike."""
    hidden = UNSEEN | FUTURE
    mask = filled(fill, apply("logical_and", [KEPT, ABOVE], torch.bool), dtype)
    zeros = torch.zeros(2, 1, N, N, dtype=dtype)
    return Case(mask, (PADDING,), lambda s, _: s.masked_fill(hidden, 0.0), lambda _: zeros.masked_fill(hidden, fill))


FILLS = {f"fill {fill:g}": filled_case(fill) for fill in (-1e4, -1e9, torch.finfo(DOUBLE).min)}


# ---- the three ways of computing it ----------------------------------------------------------------------------------
def dense(case: Case, given: Problem, hidden_is: float = 0.0) -> list[Tensor]:
    """out, gradients of q, k, v, learned sources, sinks: by autograd, in float64."""
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    sources = [x.clone().requires_grad_(i in case.learned) for i, x in enumerate(case.sources)]
    sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
    keys, values = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = case.change(q @ keys.mT * given.scale, *sources) + case.add(*sources)
    scores = scores + torch.zeros(N, N, dtype=given.q.dtype).masked_fill(~visible(case.pattern, N, N), -INF)
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None, None].expand(2, HEADS, N, 1)], -1)
    hidden = (scores == -INF).all(-1, keepdim=True) & (hidden_is == 0.0)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., :N]
    if case.dropout_p:
        weights = weights * Dropout(case.dropout_p, SEED).factor(2, HEADS, range(N), range(N), DOUBLE)
    out = weights @ values
    leaves = [q, k, v, *(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def on_one_device(case: Case, given: Problem) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    sources = [x.clone().requires_grad_(i in case.learned) for i, x in enumerate(case.sources)]
    sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
    seed = SEED if case.dropout_p else None
    out = torch.ops.ringopt.attention(
        *(q, k, v, None, sources, sinks, seed, case.pattern, case.mask.text, case.dropout_p, given.scale)
    )
    leaves = [q, k, v, *(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


def over_ranks(case: Case, given: Problem, p: int, layout: str, strategy: str, kernel: str = "auto") -> list[Tensor]:
    """The same in sequence order; parts of sources are summed, rows of sources joined."""
    dims = case.mask.row_dims

    def body(mesh: ThreadMesh) -> tuple[list[Tensor], list[Tensor]]:
        q, k, v, dout = (shard(x, layout, p, mesh.rank) for x in (given.q, given.k, given.v, given.dout))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        mine = torch.tensor(rows_of(layout, N, p, mesh.rank), dtype=torch.int64)
        held = [x.index_select(dims[i], mine) if i in dims else x.clone() for i, x in enumerate(case.sources)]
        sources = [x.requires_grad_(i in case.learned) for i, x in enumerate(held)]
        sinks = case.sinks.clone().requires_grad_() if case.sinks is not None else None
        seed = SEED.clone() if case.dropout_p else None
        out, _ = torch.ops.ringopt.ring_attention(
            *(*leaves, sources, sinks, seed, N, N, case.pattern, case.mask.text, case.learned, case.dropout_p),
            *(given.scale, layout, layout, strategy, kernel, mesh.name, VERSION),
        )
        read = [*(sources[i] for i in case.learned), *([sinks] if sinks is not None else [])]
        grads = torch.autograd.grad(out, (*leaves, *read), dout)
        return [out.detach(), *grads[:3]], list(grads[3:])

    results = run_on_threads(p, body)
    wholes = [join(parts, layout) for parts in zip(*(rows for rows, _ in results), strict=True)]
    numbers = [*case.learned, -1]
    for i, parts in enumerate(zip(*(parts for _, parts in results), strict=True)):
        wholes.append(join(parts, layout) if numbers[i] in dims else torch.stack(parts).sum(0))
    return wholes


WAYS = [(1, "contiguous", "ring"), (2, "zigzag", "ring"), (3, "zigzag", "gather"), (4, "contiguous", "ring")]
# For masks without rows of a rank.
OTHER_WAYS = [(3, "zigzag", "ulysses"), (3, "zigzag", "ring_q"), (4, "zigzag", "hybrid(2)")]


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
    monkeypatch.setattr(tiles, "MASK_ELEMENTS", 40)
    monkeypatch.setattr(math, "SCORES", 8 * 8 * 30)
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


# ---- dropout ---------------------------------------------------------------------------------------------------------
def test_the_mask_of_dropout_looks_like_chance() -> None:
    p, rows, keys = 0.3, 300, 400
    kept = Dropout(p, SEED).kept(2, 3, range(rows), range(keys)).to(DOUBLE)
    other = Dropout(p, SEED + 1).kept(2, 3, range(rows), range(keys)).to(DOUBLE)
    x, y = ((z - (1 - p)) / (p * (1 - p)) ** 0.5 for z in (kept, other))  # of mean 0 and variance 1
    assert abs(float(x.mean())) < 4 / x.numel() ** 0.5
    assert abs(float((x * y).mean())) < 4 / x.numel() ** 0.5  # another seed, another mask
    for dims in ((0, 1, 2), (0, 1, 3), (2, 3)):
        mean = x.mean(dims)
        assert float(mean.abs().max()) < 4.5 / (x.numel() / mean.numel()) ** 0.5
    one = x[1, 2]
    for line in (one, one.T):  # no two rows, and no two keys, alike
        size, length = line.shape
        assert float((line @ line.T / length - torch.eye(size) * (line**2).mean(1)).abs().max()) < 6 / length**0.5
    assert abs(float((x[0, 0] * x[0, 1]).mean())) < 4 / one.numel() ** 0.5  # nor two heads
    assert abs(float((x[0, 0] * x[1, 0]).mean())) < 4 / one.numel() ** 0.5  # nor two batch rows
    assert float(torch.fft.fft2(one).abs().max()) < 5 * one.numel() ** 0.5  # no period in either direction


def test_the_hash_is_that_of_64_bit_arithmetic() -> None:
    """SplitMix64 in Python's unbounded integers: shifts are logical, products wrap."""
    most = 2**64 - 1

    def scrambled(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & most
        return (x ^ x >> 27) * 0x94D049BB133111EB & most

    def mixed(x: int) -> int:
        x = scrambled(x & most)
        return x ^ x >> 31

    p = 0.37
    kept = Dropout(p, SEED).kept(2, 2, range(3, 6), range(5, 12))
    for b, h, q, k in product(range(2), range(2), range(3), range(7)):
        row = mixed(int(SEED) + 0x9E3779B97F4A7C15)
        for place in (b, h, q + 3):
            row = mixed(row ^ place)
        key = mixed(mixed(int(SEED) + 0x5851F42D4C957F2D) ^ (k + 5))
        signed = (scrambled(row ^ key) ^ 2**63) - 2**63
        assert bool(kept[b, h, q, k]) == (signed >= int(p * 2**64) - 2**63)


def test_a_weight_is_dropped_by_its_place() -> None:
    drop = Dropout(0.5, SEED)
    whole = drop.kept(2, 3, range(20), range(30))
    assert torch.equal(drop.kept(2, 3, range(7, 11), range(13, 29)), whole[:, :, 7:11, 13:29])
    assert torch.equal(drop.kept(1, 2, range(20), range(30)), whole[:1, :2])
    assert Dropout(1e-9, SEED).kept(2, 3, range(20), range(30)).all()
    assert not Dropout(1.0, SEED).kept(2, 3, range(20), range(30)).any()


def test_compiled_code_drops_the_same() -> None:
    """At a size where C++ may reason about its loops: overflow there once wrote past the end."""

    def program(seed: Tensor) -> Tensor:
        return Dropout(0.5, seed).kept(2, 3, range(7, 77), range(11, 144))

    assert torch.equal(torch.compile(program, fullgraph=True)(SEED), program(SEED))


@torch.compiler.config.patch(cache_key_tag=VERSION)  # the operator is cached by its name, whatever it computes
@pytest.mark.parametrize(
    "name", [pytest.param("dropout, causal", marks=pytest.mark.zoo), "dropout, sinks, softcap", "softcap"]
)
def test_compiled_code_gives_the_same_numbers(name: str) -> None:
    case, given = CASES[name], problem(N)
    how = (case.pattern, case.mask.text, case.dropout_p, given.scale)

    def program(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seed: Tensor) -> Tensor:
        extras = (sinks if case.sinks is not None else None, seed if case.dropout_p else None)
        out: Tensor = torch.ops.ringopt.attention(q, k, v, None, [], *extras, *how)
        return out

    leaves = [x.clone().requires_grad_() for x in (given.q, given.k, given.v)]
    args = (*leaves, case.sinks if case.sinks is not None else SEED, SEED)
    out = torch.compile(program, fullgraph=True)(*args)
    grads = torch.autograd.grad(out, leaves, given.dout)
    for got, right in zip((out, *grads), dense(case, given), strict=False):
        assert_near(got.detach(), right, 1e-12)


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
    assert "the ranks drop weights by seeds [5, 6], and must do so by one" in told
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
