"""Dilated windows and sinks by hand, on one device and on ranks that are threads: numbers, what travels, and what
depends on what. Programs that write such masks are compiled below."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringopt import attention, explain, record_traffic, shard, unshard
from ringopt.context_parallel.geometry.layouts import layout_of
from ringopt.errors import OptionError
from tests.context_parallel.reference import Problem, assert_near, problem, sdpa
from tests.harness.threads import run_on_threads
from tests.harness.translation import validate


def sees(n: int, window: int, rates: tuple[int, ...], causal: bool, sinks: int = 0) -> Tensor:
    """[heads, n, n] by the definition."""
    away = torch.arange(n)[:, None] - torch.arange(n)
    of_heads = [(away % rate == 0) & (away.abs() < window * rate) for rate in rates]
    visible = torch.stack(of_heads) | (torch.arange(n) < sinks)
    return visible & (away >= 0) if causal else visible


def attended(case: Problem, **asked: Any) -> list[Tensor]:
    """out and the gradients of q, k, v, whole."""
    whole = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    place = {name: asked[name] for name in ("mesh", "layout") if name in asked}
    out = attention(*(shard(x, 2, **place) for x in whole), enable_gqa=True, **asked)
    out = unshard(out, 2, length=case.q.shape[2], **place)
    return [out.detach(), *torch.autograd.grad(out, whole, case.dout)]


WINDOWS = {
    "dilated": {"window": 5, "dilation_rates": (3,)},
    "wider than the sequence": {"window": 90, "dilation_rates": (4,)},
    "fewer rows than classes": {"window": 3, "dilation_rates": (40,)},
    "sinks": {"window": 6, "sinks": 4},
    "dilated, with sinks": {"window": 4, "sinks": 3, "dilation_rates": (5,)},
    "each head another": {"window": 4, "dilation_rates": (1, 2, 2, 7)},
    "each head another, with sinks": {"window": 4, "sinks": 2, "dilation_rates": (3, 1, 3, 1)},
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize(("p", "layout"), [(1, "contiguous"), (2, "contiguous"), (3, "zigzag"), (4, "contiguous")])
def test_windows_on_any_ranks(p: int, layout: str, name: str, causal: bool) -> None:
    case, asked = problem(67), WINDOWS[name]
    rates = asked.get("dilation_rates", (1,))
    visible = sees(67, asked["window"], rates * (4 // len(rates)), causal, asked.get("sinks", 0))
    right = sdpa(case, visible)
    for found in run_on_threads(p, lambda mesh: attended(case, mesh=mesh, layout=layout, is_causal=causal, **asked)):
        for a, b in zip(found, right, strict=True):
            assert_near(a, b, 1e-12)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ranks_without_rows(n: int) -> None:
    case = problem(n)
    right = sdpa(case, sees(n, 4, (2,), True, 1))
    for found in run_on_threads(
        4, lambda mesh: attended(case, mesh=mesh, window=4, dilation_rates=(2,), sinks=1, is_causal=True)
    ):
        for a, b in zip(found, right, strict=True):
            assert_near(a, b, 1e-12)


@pytest.mark.parametrize("strategy", ["halo", "gather", "ring", "ring2", "gather_q", "ring_q", "ulysses"])
def test_every_strategy(strategy: str) -> None:
    """Classes of 50 rows each, so that tiles are of one class."""
    case = problem(300, heads=(4, 2), dims=(4, 6), batch=1)
    right = sdpa(case, sees(300, 20, (3,), True, 4))
    asked: Any = {"window": 20, "dilation_rates": (3,), "sinks": 0 if strategy == "halo" else 4, "is_causal": True}
    if strategy == "halo":
        right = sdpa(case, sees(300, 20, (3,), True))
    for found in run_on_threads(2, lambda mesh: attended(case, mesh=mesh, strategy=strategy, **asked)):
        for a, b in zip(found, right, strict=True):
            assert_near(a, b, 1e-12)


def test_masks_and_dropout_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped are the same weights on any number of ranks."""
    monkeypatch.setattr(torch, "randint", lambda *_, **__: torch.tensor(7))  # threads share one generator
    case, bias = problem(67), torch.randn(1, 4, 67, 67, dtype=torch.float64)
    asked: Any = {"window": 9, "dilation_rates": (1, 1, 2, 2), "is_causal": True}

    def body(mesh: Any) -> list[Tensor]:
        return attended(case, attn_mask=shard(bias, -2, mesh=mesh), dropout_p=0.3, mesh=mesh, **asked)

    (right,) = run_on_threads(1, body)
    for found in run_on_threads(3, body):
        for a, b in zip(found, right, strict=True):
            assert_near(a, b, 1e-12)
    visible = torch.zeros(()).masked_fill(~sees(67, 9, (1, 1, 2, 2), True), -torch.inf)
    found = run_on_threads(2, lambda mesh: attended(case, attn_mask=shard(bias[0], -2, mesh=mesh), mesh=mesh, **asked))
    for a, b in zip(found[1], sdpa(case, bias + visible), strict=True):
        assert_near(a, b, 1e-12)


# ---- what depends on what, and what travels --------------------------------------------------------------------------
@pytest.mark.parametrize("p", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_one_token_changes_the_outputs_that_see_it_and_no_other(causal: bool, p: int) -> None:
    n, token, rates = 150, 41, (1, 2, 5, 9)
    asked: Any = {"window": 4, "dilation_rates": rates, "sinks": 3, "is_causal": causal}
    case = problem(n)
    k, v = case.k.clone(), case.v.clone()
    k[:, :, token] += 1
    v[:, :, token] += 1
    before, after = (
        run_on_threads(p, lambda mesh, x=x: attended(x, mesh=mesh, **asked))[0][0]
        for x in (case, replace(case, k=k, v=v))
    )
    visible = sees(n, 4, rates, causal, 3)[:, :, token]
    assert torch.equal((before != after).any(-1), visible.expand(2, 4, n))
    assert int(visible.sum()) == (16 if causal else 28)


@pytest.mark.sample(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("p", "layout"), [(2, "contiguous"), (4, "contiguous"), (3, "zigzag"), (9, "contiguous")])
def test_only_rows_that_are_needed_travel_for_each_head(p: int, layout: str, causal: bool) -> None:
    """9 ranks hold 15 rows each: fewer than the 20 classes of the last head, of which some need none of a neighbour."""
    n, window, rates, width = 131, 3, (1, 2, 7, 20), 2 * (8 + 8) * 8
    held = [[row for rows in layout_of(layout, n, p).ranges(rank) for row in rows] for rank in range(p)]
    visible = sees(n, window, rates, causal)
    needed = [[int(visible[:, user][..., home].any(1).sum()) for home in held] for user in held]
    asked: Any = {"window": window, "dilation_rates": rates, "is_causal": causal, "strategy": "gather"}
    with record_traffic() as traffic:
        run_on_threads(p, lambda mesh: attended(problem(n, heads=(4, 4)), mesh=mesh, layout=layout, **asked))
    for rank in range(p):
        posted = [event for event in traffic.of(rank).events if event.kind == "posted"]
        sent = sum(event.bytes for event in posted if event.label.startswith("forward"))
        assert sent == width * sum(needed[user][rank] for user in range(p) if user != rank)


def test_one_device_holds_no_square() -> None:
    """[n, n] of one head alone would be 64 MiB."""
    n, d = 8192, 8
    q, k, v = (torch.randn(1, 1, n, d) for _ in range(3))
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = attention(q, k, v, window=64, dilation_rates=(16,), sinks=4, is_causal=True)
    assert max(event.cpu_memory_usage for event in profile.events()) < 8 << 20
    some = torch.tensor([0, 5, 1000, 8191])
    away = some[:, None] - torch.arange(n)
    visible = ((away % 16 == 0) & (away < 64 * 16) | (torch.arange(n) < 4)) & (away >= 0)
    torch.testing.assert_close(out[:, :, some], F.scaled_dot_product_attention(q[:, :, some], k, v, visible))


# ---- programs that write it ------------------------------------------------------------------------------------------
class Program(nn.Module):
    """Attention whose mask is `make(q_idx, kv_idx)`."""

    def __init__(self, make: Any):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.qkv = make, nn.Linear(16, 48, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        places = torch.arange(x.shape[1])
        y = F.scaled_dot_product_attention(q, k, v, self.make(places[:, None], places))
        return y.transpose(1, 2).flatten(2)


def dilated_window(q: Tensor, k: Tensor) -> Tensor:
    return ((q - k) % 3 == 0) & (q - k < 12) & (k <= q)


def dilated_window_both_ways(q: Tensor, k: Tensor) -> Tensor:
    return torch.where(((q - k) % 2 != 0) | ((q - k).abs() > 5), -torch.inf, 0.0).double()


def beside_sinks(q: Tensor, k: Tensor) -> Tensor:
    return ((((q - k) % 4 == 0) & (q - k < 20)) | (k < 3)) & (k <= q)


def strided(q: Tensor, k: Tensor) -> Tensor:
    return (q % 4 == k % 4) & (k <= q)


PROGRAMS = {
    dilated_window: "window(4,rate=3)",
    dilated_window_both_ways: "window(3,both,rate=2)",
    beside_sinks: "window(5,sinks=3,rate=4)",
    strided: "causal(rate=4)",
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_programs_that_write_it_are_found_and_send_what_is_needed(make: Any) -> None:
    x = torch.randn(2, 67, 16, dtype=torch.float64)
    assert validate(3, Program(make), x).wrong == ""
    report = explain(Program(make), x, world_size=4, options={"layout": "contiguous", "strategy": "gather"})
    (site,) = report.sites
    assert (site.pattern, site.refusal) == (PROGRAMS[make], None)
    held = [list(rows) for rank in range(4) for rows in layout_of("contiguous", 67, 4).ranges(rank)]
    seen = make(torch.arange(67)[:, None], torch.arange(67))
    seen = seen if seen.dtype == torch.bool else seen == 0
    needed = sum(int(seen[user][:, held[0]].any(0).sum()) for user in held[1:])
    assert site.bytes_sent == needed * 2 * 4 * (4 + 4) * 8


# ---- refusals --------------------------------------------------------------------------------------------------------
X = torch.ones(1, 2, 8, 4)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            {"window": 2, "dilation_rates": (0,)},
            r"dilation_rates=\(0,\)\) beside a window: a tuple of one whole number",
        ),
        ({"window": 2, "dilation_rates": (1, 2, 3)}, r"or of one for each of 2 query heads"),
        ({"window": 2, "dilation_rates": 2}, r"dilation_rates=2\) beside a window: a tuple"),
        ({"sinks": 4}, r"attention\(sinks=4\): how many first keys are seen beside a window, or a tensor of one logit"),
        ({"window": 2, "sinks": -1}, r"attention\(sinks=-1\): how many first keys"),
        (
            {"window": 2, "segment_lengths": (4,), "dilation_rates": (1,)},
            "not possible in dilated attention of segments",
        ),
    ],
)
def test_nonsense(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        attention(X, X, X, **asked)
