"""Dilated attention on one device and on ranks that are threads: outputs and gradients against the definition."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringopt import attention, record_traffic, shard, unshard
from ringopt.context_parallel.executor.dropout import Dropout
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.errors import OptionError, RingMismatchError
from ringopt.kernels.math import Math
from ringopt.ops.ring import VERSION
from tests.context_parallel.dilated.reference import Patterns, dilated, needed, torchscale
from tests.context_parallel.reference import Problem, problem
from tests.harness.threads import ThreadMesh, calls_of, run_on_threads

SCHEDULES = {
    "dividing": Patterns((8, 16, 32), (1, 2, 4)),
    "straddling": Patterns((8, 23, 40), (1, 3, 5)),
    "one pattern": Patterns((16,), (1,)),
    "longer than the sequence": Patterns((16, 500), (1, 2)),
    "rows left out": Patterns((24, 50), (2, 3)),
}
GIGAPATH = Patterns((4, 23, 128, 724, 4096), (1, 2, 4, 8, 16))  # its lengths / 256


def attended(case: Problem, patterns: Patterns, seen: Tensor | None = None, **where: Any) -> list[Tensor]:
    """out and the gradients of q, k, v, whole."""
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    place = {name: where[name] for name in ("mesh", "layout") if name in where}
    local, mask = [shard(x, 2, **place) for x in whole], None if seen is None else seen[:, None, None]
    how: Any = {
        "segment_lengths": patterns.lengths,
        "dilation_rates": patterns.rates,
        "dilation_offsets": patterns.rule,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows left out
        out = attention(*local, mask, is_causal=patterns.causal, enable_gqa=True, **how, **where)
    out = unshard(out, 2, length=case.q.shape[2], **place)
    return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]


def by_definition(case: Problem, patterns: Patterns, seen: Tensor | None = None) -> list[Tensor]:
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = dilated(*whole, patterns, seen)
    return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]


def assert_right(p: int, case: Problem, patterns: Patterns, seen: Tensor | None = None, **where: Any) -> None:
    right = by_definition(case, patterns, seen)
    for found in run_on_threads(p, lambda mesh: attended(case, patterns, seen, mesh=mesh, **where)):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rule", ["paper", "torchscale"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (2, "contiguous"), (3, "zigzag"), (4, "contiguous")])
def test_any_schedule_on_any_ranks(p: int, layout: str, name: str, causal: bool, rule: str) -> None:
    assert_right(p, problem(67), replace(SCHEDULES[name], causal=causal, rule=rule), layout=layout)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["gather", "ring"])
@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (6, 1), (5, 5)])
@pytest.mark.parametrize("p", [1, 3])
def test_heads_that_share_keys_and_keep_other_rows(p: int, heads: tuple[int, int], strategy: str) -> None:
    assert_right(p, problem(50, heads=heads, dims=(4, 6)), Patterns((7, 30, 64), (1, 2, 4), True), strategy=strategy)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_sequences_shorter_than_a_segment(n: int, layout: str) -> None:
    """Of 1 and 2 rows some of 3 ranks have none."""
    assert_right(3, problem(n), Patterns((8, 16), (1, 4), True), layout=layout)


@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True])
def test_gigapath_schedule(causal: bool) -> None:
    assert_right(4, problem(357, heads=(16, 16), dims=(4, 4), batch=1), replace(GIGAPATH, causal=causal))


@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True])
def test_segments_that_divide_nothing(causal: bool) -> None:
    case = problem(1427, heads=(4, 4), dims=(4, 4), batch=1)
    assert_right(3, case, Patterns((32, 181, 1024), (1, 2, 4), causal))


@pytest.mark.parametrize("kernel", ["auto", "math"])
@pytest.mark.parametrize(("p", "causal"), [(1, False), (1, True), (3, False), (3, True)])
def test_padding_is_not_attended(p: int, causal: bool, kernel: str) -> None:
    seen = torch.rand(2, 67, generator=torch.Generator().manual_seed(0)) > 0.3
    seen[0, :20], seen[1, 50:] = False, False  # segments of nothing but padding on either side
    assert_right(p, problem(67), Patterns((8, 23, 40), (1, 2, 4), causal), seen, kernel=kernel)


def test_padding_may_be_the_same_in_the_whole_batch() -> None:
    seen = torch.arange(67)[None] < 50
    assert_right(2, problem(67), SCHEDULES["dividing"], seen)


def test_messages_are_attended_to_after_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of segments that are cut and of those that are whole on a rank."""
    done = calls_of(monkeypatch, {Math: ("forward", "backward"), ThreadMesh: ("attend",)})
    run_on_threads(2, lambda mesh: attended(problem(67), SCHEDULES["straddling"], mesh=mesh, kernel="math"))
    assert done.count("attend") == done.count("forward") + done.count("backward") > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    case, patterns = problem(67), SCHEDULES["straddling"]
    right = by_definition(case, patterns)
    for found in run_on_threads(2, lambda mesh: attended(case.to(dtype), patterns, mesh=mesh)):
        for a, b in zip(found, right, strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5 if dtype == torch.float32 else 6e-2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (2, "contiguous"), (3, "zigzag")])
def test_dropout_by_the_place_of_query_and_key(
    p: int, layout: str, heads: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of two patterns is dropped in both or in none: as the one weight that it is in the definition."""
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(7))  # threads share one generator
    case, patterns = problem(67, heads=heads), Patterns((8, 23, 40), (1, 2, 4), causal)
    factor = Dropout(0.3, torch.tensor(7)).factor(2, heads[0], range(67), range(67), torch.float64)
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = dilated(*whole, patterns, factor=factor)
    right = [out.detach(), *torch.autograd.grad(out, whole, case.dout)]
    for found in run_on_threads(p, lambda mesh: attended(case, patterns, mesh=mesh, layout=layout, dropout_p=0.3)):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (3, "zigzag")])
def test_sinks_by_hand(p: int, layout: str) -> None:
    case, patterns = problem(67), Patterns((8, 23, 40), (1, 2, 4), True)
    sinks = torch.tensor([0.0, 2.0, -1.0, -torch.inf], dtype=torch.float64)

    def body(mesh: ThreadMesh | None) -> list[Tensor]:
        whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v, sinks)]
        if mesh is None:
            out = dilated(*whole[:3], patterns, sinks=whole[3])
        else:
            local = [shard(x, 2, mesh=mesh, layout=layout) for x in whole[:3]]
            how: Any = {"segment_lengths": patterns.lengths, "dilation_rates": patterns.rates, "is_causal": True}
            out = attention(*local, enable_gqa=True, sinks=whole[3], mesh=mesh, layout=layout, **how)
            out = unshard(out, 2, length=67, mesh=mesh, layout=layout)
        return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]

    right = body(None)
    for found in run_on_threads(p, body):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_dropout_without_ranks_draws_from_the_default_generator() -> None:
    case, patterns = problem(67), SCHEDULES["straddling"]
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(attended(case, patterns, dropout_p=0.5)[0])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


# ---- what depends on what --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_one_token_changes_the_outputs_that_see_it_and_no_other(causal: bool, p: int) -> None:
    patterns, n, token = Patterns((8, 23, 60), (1, 2, 4), causal), 90, 37
    case = problem(n)
    k, v = case.k.clone(), case.v.clone()
    k[:, :, token] += 1
    v[:, :, token] += 1
    other = Problem(case.q, k, v, case.dout)
    before, after = (run_on_threads(p, lambda mesh, x=x: attended(x, patterns, mesh=mesh))[0][0] for x in (case, other))  # type: ignore[misc]
    sees = torch.stack(patterns.times(n, 4)).any(0)[:, :, token]
    changed = (before != after).any(-1)
    assert torch.equal(changed, sees.expand(2, 4, n))
    assert 0 < int(sees.sum()) < sees.numel() // 2


# ---- what travels ----------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "patterns", [Patterns((8, 23, 40), (1, 2, 4)), Patterns((8, 23, 60), (1, 2, 4), True), GIGAPATH]
)
@pytest.mark.parametrize(("p", "layout"), [(2, "contiguous"), (3, "contiguous"), (4, "zigzag")])
def test_only_kept_rows_travel_and_only_to_those_that_see_them(p: int, layout: str, patterns: Patterns) -> None:
    n, heads, batch, dims = 131, 4, 2, 8 + 8
    held = [[row for rows in layout_of(layout, n, p).ranges(rank) for row in rows] for rank in range(p)]
    rows = needed(patterns, n, heads, held)
    with record_traffic() as traffic:
        run_on_threads(
            p, lambda mesh: attended(problem(n, heads=(4, 4)), patterns, mesh=mesh, layout=layout, strategy="gather")
        )
    for rank in range(p):
        posted = [event for event in traffic.of(rank).events if event.kind == "posted"]
        forward, backward = (
            sum(event.bytes for event in posted if event.label.startswith(way)) for way in ("forward", "backward")
        )
        sent, received = sum(user[rank] for user in rows), sum(rows[rank])
        assert forward == sent * batch * dims * 8
        assert backward == (sent + received) * batch * dims * 8  # keys again, and gradients of what came


def test_the_schedule_whose_segments_lie_within_the_shards_sends_nothing() -> None:
    case = problem(8192, heads=(1, 1), dims=(2, 2), batch=1)
    with record_traffic() as traffic:
        run_on_threads(2, lambda mesh: attended(case, Patterns((2048, 4096), (1, 2)), mesh=mesh))
    assert not [event for event in traffic.events if event.kind == "posted"]


# ---- torchscale ------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (3, "contiguous"), (2, "zigzag")])
@pytest.mark.parametrize(("lengths", "rates"), [((16, 32, 64), (1, 2, 4)), ((8, 23, 500), (1, 3, 5))])
@pytest.mark.parametrize("causal", [False, True])
def test_torchscale_mixing(causal: bool, lengths: tuple[int, ...], rates: tuple[int, ...], p: int, layout: str) -> None:
    case, patterns = problem(61, heads=(6, 6)), Patterns(lengths, rates, causal, "torchscale")
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    out = torchscale(*whole, patterns)
    right = [out.detach(), *torch.autograd.grad(out, whole, case.dout)]
    named = ",".join(f"{w}:{r}" for w, r in zip(lengths, rates, strict=True))
    text = f"dilated({named}{',causal' if causal else ''},torchscale offsets,torchscale mixing)"

    def body(mesh: ThreadMesh) -> list[Tensor]:
        given = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
        local = [shard(x, 2, mesh=mesh, layout=layout) for x in given]
        config = (61, text, 0.0, 8**-0.5, layout, "auto", "auto", mesh.name, VERSION)
        found, _lse = torch.ops.ringopt.dilated_attention(*local, None, None, None, *config)
        found = unshard(found, 2, length=61, mesh=mesh, layout=layout)
        return [found.detach(), *torch.autograd.grad(found, given, case.dout)]

    for results in run_on_threads(p, body):
        for a, b in zip(results, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# ---- the operator ----------------------------------------------------------------------------------------------------
def test_opcheck() -> None:
    case = problem(21)
    operands = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    where = (0.3, "contiguous", "auto", "auto", "pretend:0/1", VERSION)
    sinks, seed = torch.randn(1, 4, dtype=torch.float64).requires_grad_(), torch.tensor(3)
    for *beside, p in ((None, None, None, 0.0), (torch.arange(21).expand(2, 1, 1, 21) > 4, sinks, seed, 0.2)):
        config = (21, "dilated(8:1,13:2,causal)", p, *where)
        torch.library.opcheck(torch.ops.ringopt.dilated_attention.default, (*operands, *beside, *config))


# ---- refusals --------------------------------------------------------------------------------------------------------
X = torch.ones(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dilation_rates": (1,)}, r"segment_lengths=None, dilation_rates=\(1,\): both are tuples of whole numbers"),
        ({"dilation_offsets": "torchscale"}, "both are tuples of whole numbers, 1 or more"),
        ({"segment_lengths": (4, 8), "dilation_rates": (1,)}, "2 lengths and 1 rates; every segment length needs its"),
        ({"segment_lengths": (4, 0), "dilation_rates": (1, 1)}, "both are tuples of whole numbers, 1 or more"),
        ({"segment_lengths": (4,), "dilation_rates": (8,)}, "rate 8 is above its segment length 4"),
        ({"segment_lengths": (4,), "dilation_rates": (1,), "dilation_offsets": "fkodom"}, "expected one of 'paper', "),
        ({"segment_lengths": (4,), "dilation_rates": (1,), "window": 2}, r"attention\(window=\.\.\.\) is not possible"),
        ({"segment_lengths": (4,), "dilation_rates": (1,), "sinks": 1}, r"sinks=\.\.\.\) is not possible in dilated"),
        ({"segment_lengths": (4,), "dilation_rates": (1,), "strategy": "halo"}, "travels by one of 'auto', 'gather', "),
        (
            {"segment_lengths": (4,), "dilation_rates": (1,), "attn_mask": torch.ones(8, 8, dtype=torch.bool)},
            r"an attn_mask of keys alone, \[1, 1, 1, 8\] of bool .* found \[8, 8\] torch.bool",
        ),
    ],
)
def test_what_makes_no_sense(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        attention(X, X, X, **asked)


def test_cross_attention_is_refused() -> None:
    with pytest.raises(OptionError, match=r"is self attention; the ranks hold \[8\] rows of query and \[4\] of key"):
        attention(X, X[:, :, :4], X[:, :, :4], segment_lengths=(4,), dilation_rates=(1,))


def test_tokens_that_no_pattern_keeps() -> None:
    told = (
        r"dilated\(4:4\) keeps 4 of 8 tokens in no head, and leaves 12 of 16 places \(token, head\) out: their output "
        r"is 0\. A pattern of rate 1 keeps all"
    )
    with pytest.warns(UserWarning, match=told):
        out = attention(X, X, X, segment_lengths=(4,), dilation_rates=(4,))
    assert out.count_nonzero(-1).bool().nonzero().tolist() == [[0, 0, 0], [0, 0, 4], [0, 1, 1], [0, 1, 5]]


def test_ranks_with_other_schedules() -> None:
    def body(mesh: ThreadMesh) -> None:
        with pytest.raises(RingMismatchError, match="pattern="):
            attention(X, X, X, segment_lengths=(4 + mesh.rank,), dilation_rates=(1,), mesh=mesh)

    run_on_threads(2, body)
